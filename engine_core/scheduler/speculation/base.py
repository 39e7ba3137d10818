"""What makes drafts: a `Proposer` from token ids alone, or the model runner."""

from collections.abc import Hashable, Sequence
from typing import Protocol

from engine_core.scheduler.batch_state import Int32Array


class Proposer(Protocol):
    """Guesses what sequences go on with. Called by the loop between two steps, so a call takes
    microseconds. What is proposed decides speed, never a token.

    A proposer that runs a model or reads hidden states is the model runner's: the plan tells it how
    many drafts to make behind what the step samples (`SchedulerOutput.num_drafts_wanted`), and it
    answers with `ModelRunnerOutput.draft_token_ids`."""

    @property
    def name(self) -> str:
        """The proposer's name, as `--speculative` has it."""

    def propose(self, tokens: Int32Array, scope: Hashable, most: int) -> list[int]:
        """Up to `most` tokens, at least 1, that may follow; empty: it knows nothing.

        Args:
            tokens: prompt and output so far, at least one; a view, not to be kept.
            scope: only requests of one scope may learn from each other (cache salt, adapter).
        """

    def learn(self, output: Sequence[int], scope: Hashable) -> None:
        """A sequence is over; these are its output tokens. Memory for them is bounded."""
