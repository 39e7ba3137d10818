"""Structured output as the scheduler sees it: requests that are refused late, and masks of tokens
for each step. What a grammar is, only `engine_core/structured_output/` knows."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as AnySequence
from typing import Protocol

from engine_core.scheduler.plan import TokenMasks
from engine_core.scheduler.request import Request, Sequence


@dataclasses.dataclass(slots=True)  # one a sequence and step: frozen takes a microsecond more
class ConstrainedSequence:
    """A sequence of the plan whose next tokens follow a grammar or its own tokens: the one behind
    these, and one behind each of its drafts. `place`: in the batch."""

    place: int
    sequence: Sequence
    num_output_tokens: int
    drafts: AnySequence[int]


KnownTokens = tuple[Sequence, int, int]
"""A sequence, its number of output tokens and the last of these."""
ForcedTokens = tuple[Sequence, list[int]]


class Constraints(Protocol):
    """Makes token masks. All calls come from the loop's thread."""

    def take_compiled(self) -> AnySequence[tuple[Request, str | None]]:
        """Requests that need wait for their grammars no longer, since the last call: None, or why
        these cannot be used."""

    def forced_tokens(self, sequences: Iterable[KnownTokens]) -> Iterable[ForcedTokens]:
        """The next tokens of sequences that are in no step in flight and had a mask, as
        long as only one is possible."""

    def begin_masks(self, constrained: AnySequence[ConstrainedSequence]) -> TokenMasks | None:
        """Start to make the masks of a step. The sequences have their tokens as they are now. None:
        every token is possible everywhere."""
