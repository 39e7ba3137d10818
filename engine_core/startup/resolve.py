"""From options and a loaded model to the configuration in force: sizes, cache, defaults.

Resolves every "auto" and None that the model or the memory decides. Must not know sockets or the
loop.
"""

from engine_core.config import EngineConfig
from engine_core.errors import ConfigurationError
from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.model_files import ModelFiles
from engine_core.model_runner.cache_layout import CacheLayout, plan_cache_layout
from engine_core.options.engine import EngineOptions
from engine_core.startup.cache_size import CacheDemand, choose_num_blocks, choose_num_host_blocks
from engine_core.startup.capacity import RequestNeed, fit_max_model_len
from engine_core.startup.device import choose_cache_dtype, defaults_of, dtype_name
from engine_core.startup.device_memory import CudaMeter, read_device_memory
from engine_core.startup.model_loading import LoadedModel
from engine_core.startup.runner_spec import RunnerSpec
from kernels.interface.operations import cached_head_bytes


def plan_runner(options: EngineOptions, files: ModelFiles, loaded: LoadedModel) -> RunnerSpec:
    """All of the runner's sizes but those that the memory decides.

    Raises:
        ConfigurationError: --max-model-len is beyond the model's, or the device cannot have blocks
            of that size.
    """
    spec = loaded.model.kv_cache_spec
    max_model_len = options.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}, the model was made for {spec.max_model_len}; "
            "lower it"
        )
    if loaded.ops.device.type == "cuda" and options.block_size & (options.block_size - 1):
        raise ConfigurationError(
            f"--block-size is {options.block_size}; on a GPU it must be a power of two, such as 16"
        )
    defaults = defaults_of(loaded.ops.device, is_quantised=loaded.is_quantised)
    layout = plan_cache_layout(spec.sliding_windows)
    cache_dtype = choose_cache_dtype(
        options.kv_cache_dtype, loaded.dtype, keeps_bytes=loaded.computes_in_bytes
    )
    if loaded.model_impl == "transformers" and cache_dtype != loaded.dtype:
        raise ConfigurationError(
            f"--kv-cache-dtype {options.kv_cache_dtype} needs our own model code, and "
            f"{loaded.architecture} runs through transformers'; leave it at auto"
        )
    slot_bytes = 2 * spec.num_kv_heads * cached_head_bytes(spec.head_size, cache_dtype)
    return RunnerSpec(
        loaded=loaded,
        layout=layout,
        cache_dtype=cache_dtype,
        block_size=options.block_size,
        block_bytes=layout.num_tensors * options.block_size * slot_bytes,
        max_num_seqs=options.max_num_seqs or defaults.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or defaults.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_num_logprobs=options.max_logprobs,
        eos_token_ids=files.eos_token_ids,
        on_device=loaded.ops.device.type == "cuda",
        capture_at_start=options.capture_at_start,
        enforce_eager=options.enforce_eager,
    )


def resolve_config(
    options: EngineOptions, files: ModelFiles, runner: RunnerSpec, *, address: str
) -> EngineConfig:
    """The configuration in force. On a GPU the largest step is run, to see what it takes.

    Raises:
        ConfigurationError: sizes that contradict each other or the memory.
        CacheTooSmall: memory does not hold a useful cache.
    """
    loaded = runner.loaded
    limit = runner.max_num_batched_tokens
    max_chunk_size = min(options.max_chunk_size or limit, limit)
    need = RequestNeed(groups_of(runner.layout), max_chunk_size, runner.block_size)
    num_blocks = _choose_num_blocks(options, runner, need)
    num_host_blocks = choose_num_host_blocks(
        options.host_cache_memory,
        block_bytes=runner.block_bytes,
        num_blocks=num_blocks,
        cache_is_on_host=loaded.ops.device.type == "cpu",
    )
    return EngineConfig(
        model=options.model_name or files.name,
        architecture=loaded.architecture,
        model_impl=loaded.model_impl,
        dtype=dtype_name(loaded.dtype),
        weights=loaded.weights,
        kv_cache_dtype=dtype_name(runner.cache_dtype),
        device=loaded.ops.device.type,
        load_format=options.load_format,
        batch_invariant=options.batch_invariant,
        capture_at_start=options.capture_at_start,
        enforce_eager=options.enforce_eager,
        num_threads=loaded.ops.num_threads,
        max_model_len=fit_max_model_len(
            need,
            num_blocks=num_blocks,
            watermark=options.watermark,
            max_model_len=runner.max_model_len,
            is_asked_for=options.max_model_len is not None,
        ),
        max_num_batched_tokens=runner.max_num_batched_tokens,
        max_num_seqs=runner.max_num_seqs,
        max_chunk_size=max_chunk_size,
        block_size=runner.block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=num_blocks * runner.block_bytes,
        num_host_blocks=num_host_blocks,
        host_cache_bytes=num_host_blocks * runner.block_bytes,
        enable_prefix_caching=options.enable_prefix_caching,
        watermark=options.watermark,
        max_logprobs=options.max_logprobs,
        address=address,
        drain_timeout_s=options.drain_timeout,
        trace=None if options.trace is None else str(options.trace.absolute()),
        batching=options.batching,
        prefill_delay_factor=options.prefill_delay_factor or 0.0,
        preemption_mode=options.preemption_mode,
        scheduling_policy=options.scheduling_policy,
        force_preemption=options.force_preemption is not False,
        priority_min_gain=options.priority_min_gain or 1,
        priority_ageing_s=options.priority_ageing_s,
        tenant_weights=options.tenant_weights(),
        slo_tpot_ms=options.slo_tpot_ms,
        slo_ttft_ms=options.slo_ttft_ms,
        max_num_partial_prefills=options.max_num_partial_prefills,
        max_long_partial_prefills=options.max_long_partial_prefills,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
    )


def groups_of(layout: CacheLayout) -> list[KVCacheGroupSpec]:
    """The layout's groups as the cache knows them."""
    return [KVCacheGroupSpec(group.sliding_window) for group in layout.groups]


def _choose_num_blocks(options: EngineOptions, runner: RunnerSpec, need: RequestNeed) -> int:
    device = runner.loaded.ops.device
    if device.type == "cpu":
        memory = None
        step_bytes = runner.loaded.step_bytes(runner.max_num_batched_tokens, runner.max_num_seqs)
    else:
        meter = CudaMeter(device)
        memory = read_device_memory(meter)
        step_bytes = runner.measure_step_bytes(meter)
    return choose_num_blocks(
        CacheDemand(
            block_bytes=runner.block_bytes,
            blocks_per_request=need.num_blocks(runner.max_model_len),
            max_num_seqs=runner.max_num_seqs,
            step_bytes=step_bytes,
        ),
        num_blocks=options.num_blocks,
        kv_cache_memory=options.kv_cache_memory,
        memory_fraction=options.memory_fraction or defaults_of(device).memory_fraction,
        memory=memory,
    )
