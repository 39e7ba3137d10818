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


class StepBudget(Protocol):
    """Chooses each step's token budget."""

    def num_tokens(
        self, now: float, running: RunningSequences, waiting_arrival_s: float | None
    ) -> int:
        """Most tokens of the next step, from 1 to max_num_batched_tokens. `waiting_arrival_s` is
        the arrival of the next waiting request, None if none waits."""
        ...

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """A step took that long, from its planning to its update."""
        ...


class FixedBudget:
    """The same number of tokens every step."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._num_tokens = max_num_batched_tokens

    def num_tokens(
        self, now: float, running: RunningSequences, waiting_arrival_s: float | None
    ) -> int:
        return self._num_tokens

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """Nothing to learn."""
