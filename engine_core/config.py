"""The daemon's configuration once everything is known. No "auto" survives into it."""

import dataclasses
import json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Resolved values, as printed at start. Counts in tokens, blocks or requests; times in s."""

    model: str
    architecture: str
    model_impl: str
    dtype: str
    device: str
    num_threads: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_chunk_size: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    enable_prefix_caching: bool
    watermark: float
    max_logprobs: int
    address: str
    drain_timeout_s: float

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))
