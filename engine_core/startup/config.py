"""The daemon's configuration once everything is known. No "auto" survives into it."""

import dataclasses
import json
from typing import Literal

from engine_core.kv_cache import PoolSizes
from engine_core.scheduler import SchedulerConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Resolved values, as printed at start. Counts in tokens, blocks or requests; times in s."""

    model: str
    architecture: str
    model_impl: str
    dtype: str
    dtype_reason: str = ""
    """Why `auto` means it; empty: it was named."""
    instruction_set: str
    """The instruction set that the kernels use: "amx", "avx512"."""
    weights: str
    """Formats of the layers' weights, the one with most bytes first: "Q4_1+Q8_0"."""
    kv_cache_dtype: str
    device: str
    device_reason: str = ""
    """Why `auto` is not the GPU that there is."""
    tensor_parallel_size: int = 1
    load_format: Literal["auto", "safetensors", "gguf", "dummy"]
    batch_invariant: bool
    capture_at_start: bool
    enforce_eager: bool
    num_threads: int
    num_threads_reason: str
    """What has made them fewer than the process's CPUs; empty: nothing."""
    block_size: int
    num_blocks: PoolSizes
    kv_cache_bytes: int
    num_host_blocks: PoolSizes
    host_cache_bytes: int
    enable_prefix_caching: bool
    state_checkpoint_interval: int
    """Tokens, of which one state is kept in the prefix cache; 0: none is for its place."""
    watermark: float
    max_loras: int
    """Most adapters in a step; 0: requests have none."""
    max_lora_rank: int
    adapter_bytes: int
    """Most memory that adapters take."""
    max_logprobs: int
    logprobs_mode: str
    logits_processors: tuple[str, ...]
    address: str
    max_clients: int
    max_prompt_embeds_bytes: int
    """Most bytes of a request's hidden states; 0: none are taken."""
    isolate_tenants: bool
    drain_timeout_s: float
    trace: str | None
    speculative: str | None
    """The method that makes drafts."""
    scheduler: SchedulerConfig

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))
