"""The scheduler's numbers at one moment. Counters grow from the start."""

import dataclasses

from protocol.outputs import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Blocks: total = in use + cached (free, still findable) + empty."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_in_use: int
    num_blocks_cached: int
    block_size: int
    num_steps: int
    """Steps that ran at least one token."""
    num_prompt_tokens: int
    """Of all requests at their first admission, cached ones included."""
    num_cached_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_finished: dict[FinishReason, int]


@dataclasses.dataclass(slots=True)
class Counters:
    """What the scheduler counts while it runs."""

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_finished: dict[FinishReason, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
