"""What is counted of one request: for its answers, and for those who ask where it is."""

import dataclasses

from protocol.explanations import CacheLookup, Preemption

_MOST_NOTED = 64
"""The last preemptions of a request that are kept in words."""


@dataclasses.dataclass(slots=True)
class Account:
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at the first admission; None before it."""
    cache_lookup: CacheLookup | None = None
    """How the cache was searched then."""
    num_preemptions: int = 0
    preemptions: list[Preemption] = dataclasses.field(default_factory=list)
    """The latest preemptions, in order."""
    num_draft_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_tokens: int = 0
    """Drafts that are in the output."""
    _has_answer: bool = False
    """Whether an output was made."""

    def add_preemption(self, preemption: Preemption) -> None:
        self.num_preemptions += 1
        del self.preemptions[: -_MOST_NOTED + 1]
        self.preemptions.append(preemption)

    def take_num_cached_tokens(self) -> int | None:
        """`num_cached_tokens` for a request's first output, None for each other."""
        has_answer, self._has_answer = self._has_answer, True
        return None if has_answer else self.num_cached_tokens
