"""How many tokens a step may have: the interface, and the fixed answer."""

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class RunningSequences:
    """The running sequences before a step is planned, as columns in order of admission. Views or
    copies: not to be changed, not to be kept."""

    num_tokens: Int32Array
    """Prompt and output."""
    num_computed_tokens: Int32Array
    num_prompt_tokens: Int32Array
    first_token_s: Float64Array
    """When the first output token was there, on the scheduler's clock; NaN before it."""
    arrival_s: Float64Array
    max_num_tokens: Int32Array
    """With so many the sequence is over, if it did not stop before."""


NOTHING_RUNNING = RunningSequences(
    *(np.zeros(0, np.int32),) * 3, *(np.zeros(0),) * 2, np.zeros(0, np.int32)
)


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingRequests:
    """The waiting queue in sums, as nobody looks at each of a hundred thousand in every step."""

    num_requests: int
    """At least 1."""
    num_tokens: int
    """Prompt and output."""
    head_arrival_s: float
    """Of the next one."""
    num_admissible: int
    """As far as --max-num-seqs allows; blocks not looked at."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step runs, in numbers that its time depends on."""

    num_tokens: int
    """Computed in the step."""
    num_sequences: int
    num_context_tokens: int
    """Keys and values read, summed over sequences: computed + scheduled tokens of each."""
    num_attention_pairs: int
    """Query-key pairs, summed over sequences: scheduled * (computed + scheduled) of each."""


class TokenBudget(Protocol):
    """Chooses each step's token budget."""

    @property
    def looks_at_load(self) -> bool:
        """Whether the answer depends on what runs and waits, and on how long steps took. If not,
        `num_tokens` is told of nothing and `observe` is not called."""
        ...

    def num_tokens(
        self, now: float, running: RunningSequences, waiting: WaitingRequests | None
    ) -> int:
        """Most tokens of the next step, from 1 to max_num_batched_tokens. None: nobody waits."""
        ...

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """A step took that long, from its planning, or from the end of the step before it if that
        was later, to its update."""
        ...


class FixedTokenBudget:
    """The same number of tokens every step."""

    looks_at_load = False

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._num_tokens = max_num_batched_tokens

    def num_tokens(
        self, now: float, running: RunningSequences, waiting: WaitingRequests | None
    ) -> int:
        return self._num_tokens

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """Nothing to learn."""
