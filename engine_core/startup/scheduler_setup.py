"""From the daemon's configuration to its scheduler's, its cache, and the record of what they do.

Must not know tensors or sockets.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from engine_core.config import EngineConfig
from engine_core.errors import ConfigurationError
from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.scheduler import SchedulerConfig
from engine_core.trace.writer import TraceWriter


def scheduler_config_of(config: EngineConfig, *, max_steps_in_flight: int = 1) -> SchedulerConfig:
    """What the scheduler reads of the configuration, in its own names.

    Args:
        max_steps_in_flight: as many as the executor takes.
    """
    return SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_chunk_size=config.max_chunk_size,
        scheduling_policy=config.scheduling_policy,
        batching=config.batching,
        prefill_delay_factor=config.prefill_delay_factor,
        preemption_mode=config.preemption_mode,
        priority_min_gain=config.priority_min_gain,
        force_preemption=config.force_preemption,
        priority_ageing_s=config.priority_ageing_s,
        tenant_weights=config.tenant_weights,
        slo_tpot_ms=config.slo_tpot_ms,
        slo_ttft_ms=config.slo_ttft_ms,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_steps_in_flight=max_steps_in_flight,
    )


def kv_cache_of(config: EngineConfig, groups: Sequence[KVCacheGroupSpec]) -> KVCacheManager:
    """An empty cache of the configured size."""
    return KVCacheManager(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        groups=groups,
        enable_prefix_caching=config.enable_prefix_caching,
        watermark=config.watermark,
        num_host_blocks=config.num_host_blocks,
    )


def trace_of(
    config: EngineConfig,
    scheduler_config: SchedulerConfig,
    groups: Sequence[KVCacheGroupSpec],
    eos_token_ids: Sequence[int],
) -> list[TraceWriter]:
    """Empty unless a trace was asked for. Its header has all that a replay must build again: the
    configuration, "scheduler" in the scheduler's own names, "sliding_windows" of the cache's groups
    and "eos_token_ids".

    Raises:
        ConfigurationError: the file cannot be written.
    """
    if config.trace is None:
        return []
    settings = dataclasses.asdict(config) | {
        "scheduler": dataclasses.asdict(scheduler_config),
        "sliding_windows": [group.sliding_window for group in groups],
        "eos_token_ids": list(eos_token_ids),
    }
    try:
        return [
            TraceWriter(
                Path(config.trace),
                started_s=time.monotonic(),
                model=config.model,
                config=settings,
                max_steps_in_flight=scheduler_config.max_steps_in_flight,
            )
        ]
    except OSError as error:
        raise ConfigurationError(
            f"--trace: cannot write {config.trace}: {error.strerror}; choose another file"
        ) from error
