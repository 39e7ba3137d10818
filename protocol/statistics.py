"""The engine's numbers at one moment. Counters grow from the start of the daemon."""

from protocol.base import Message


class EngineStatistics(Message, frozen=True, tag=2):
    uptime_s: float
    num_clients: int
    num_running: int
    num_waiting: int
    # KV cache, in blocks; total = in use + cached (free, still findable) + empty
    num_blocks: int
    num_blocks_in_use: int
    num_blocks_cached: int
    block_size: int
    # counters
    num_steps: int
    num_prompt_tokens: int
    """Prompt tokens of all admitted requests, cached ones included."""
    num_cached_prompt_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    num_generated_tokens: int
    num_preemptions: int
    num_finished: dict[str, int]
    """Finished requests by reason (the names of FinishReason)."""
    step_time_s: float
    """Seconds spent in steps, all together."""
    model_time_s: float
    """Of `step_time_s`, the share of the model runner."""
