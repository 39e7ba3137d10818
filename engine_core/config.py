"""The daemon's configuration once everything is known. No "auto" survives into it."""

import dataclasses
import json
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Resolved values, as printed at start. Counts in tokens, blocks or requests; times in s."""

    model: str
    architecture: str
    model_impl: str
    dtype: str
    weights: str
    """Formats of the dense layers' weights, the one with most bytes first: "Q4_1+Q8_0"."""
    kv_cache_dtype: str
    device: str
    load_format: Literal["auto", "dummy"]
    batch_invariant: bool
    capture_at_start: bool
    enforce_eager: bool
    num_threads: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_chunk_size: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    num_host_blocks: int
    host_cache_bytes: int
    enable_prefix_caching: bool
    watermark: float
    max_logprobs: int
    address: str
    drain_timeout_s: float
    trace: str | None
    batching: Literal["mixed", "prefill-first"]
    prefill_delay_factor: float
    preemption_mode: Literal["default", "recompute", "swap", "auto"]
    scheduling_policy: Literal["fcfs", "priority", "fair"]
    force_preemption: bool
    priority_min_gain: int
    priority_ageing_s: float | None
    tenant_weights: dict[str, float]
    slo_tpot_ms: float | None
    slo_ttft_ms: float | None
    max_num_partial_prefills: int | None
    max_long_partial_prefills: int | None
    long_prefill_token_threshold: int | None
    max_queued_requests: int | None
    max_queued_tokens: int | None

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))
