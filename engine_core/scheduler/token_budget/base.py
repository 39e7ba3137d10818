"""How many tokens a step may have: the interface, and the fixed budget."""

import dataclasses

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.batch_state import Int32Array

Float64Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class RunningSequences:
    """The running sequences before a step is planned, as columns in order of admission. Views or
    copies: not to be changed, not to be kept."""

    num_tokens: Int32Array
    """Prompt and output tokens of each sequence."""
    num_computed_tokens: Int32Array
    num_prompt_tokens: Int32Array
    first_token_s: Float64Array
    """When the first output token was there, on the scheduler's clock; NaN before it."""
    arrival_s: Float64Array
    max_len: Int32Array
    """Length at which the sequence must stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingRequests:
    """The waiting queue in sums: it may be long."""

    num_requests: int
    """The number of waiting requests, at least 1."""
    num_tokens: int
    """Prompt and output tokens of the waiting requests."""
    head_arrival_s: float
    """When the next request arrived, on the scheduler's clock."""
    num_admissible: int
    """Waiting requests that --max-num-seqs lets in; blocks are not considered."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepLoad:
    """A step in numbers that its time depends on."""

    num_tokens: int
    """Tokens computed in the step."""
    num_sequences: int
    num_context_tokens: int
    """Keys and values read, summed over sequences: computed + scheduled tokens of each."""
    num_attention_pairs: int
    """Query-key pairs, summed over sequences: scheduled * (computed + scheduled) of each."""


class TokenBudget:
    """The same number of tokens every step, or fewer while there are several requests. A budget
    that depends on the load overrides."""

    looks_at_load = False
    """Whether `num_tokens` and `observe` are called."""

    def __init__(
        self, max_num_batched_tokens: int, max_num_shared_tokens: int | None = None
    ) -> None:
        self.max_num_tokens = max_num_batched_tokens
        self.max_num_shared_tokens = max_num_shared_tokens or max_num_batched_tokens

    def num_tokens(
        self, now: float, running: RunningSequences, waiting: WaitingRequests | None
    ) -> int:
        """Most tokens of the next step, from 1 to `max_num_tokens`."""
        return self.max_num_tokens

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """A step took that long, from its planning, or from the end of the step before it if that
        was later, to its update."""
