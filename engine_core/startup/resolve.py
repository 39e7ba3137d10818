"""From options and a loaded model to the configuration in force: every "auto" and None that the
model or the memory decides."""

import dataclasses
import logging

import torch

from engine_core.errors import ConfigurationError
from engine_core.kv_cache import PoolSizes
from engine_core.logits_processors import NamedProcessor
from engine_core.model_files import ModelFiles
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.encoder_runner import EncoderRunner
from engine_core.model_runner.gpu import GPUModelRunner
from engine_core.models.decoder import decoder_of
from engine_core.models.encoders.bidirectional import AnyEncoder
from engine_core.models.layer_cache import Latent
from engine_core.models.parallel.stages import Stage
from engine_core.options.engine import EngineOptions
from engine_core.scheduler import SchedulerConfig
from engine_core.server.transport import MOST_TOKENS
from engine_core.startup.adapters import make_adapter_pool
from engine_core.startup.config import EngineConfig
from engine_core.startup.device import choose_cache_dtype, defaults_of, dtype_name
from engine_core.startup.encoder_decoder import encoder_blocks
from engine_core.startup.memory import (
    CudaMeter,
    DeviceMemory,
    HostMemory,
    PoolShares,
    RequestBlocks,
    checkpoint_interval,
    choose_num_blocks,
    choose_num_host_blocks,
    fit_max_model_len,
    read_device_memory,
)
from engine_core.startup.model import LoadedModel
from engine_core.startup.multimodal import encoder_bytes, with_encoder_sizes
from engine_core.startup.runner_spec import RunnerSpec
from kernels.cpu.threads import WrongNumberOfThreads, choose_threads
from kernels.interface.operations import Operations

logger = logging.getLogger(__name__)

_MOST_DRAFTS = 256
"""Most drafts of a step, over all sequences."""
_ENCODER_TOKENS = 512
"""Tokens of an encoder's step: products have their best rate, and others need not wait long."""
_FORCED_TOKENS = 4
"""Tokens forced by a grammar that a step has room for, for each sequence."""


def plan_runner(
    options: EngineOptions,
    files: ModelFiles,
    loaded: LoadedModel,
    logits_processors: tuple[NamedProcessor, ...] = (),
) -> RunnerSpec:
    """All of the runner's sizes but those that the memory decides. Raises ConfigurationError:
    --max-model-len is beyond the model's, or the device cannot have blocks of that size."""
    if not loaded.generates and options.speculation.speculative is not None:
        raise ConfigurationError(
            "--speculative has no effect on a model that generates no text; omit it, or use "
            "--runner generate"
        )
    num_stages = loaded.collectives.parallel.pp_size
    cache_dtype = _cache_dtype(options, loaded)
    scheduler = _plan_scheduler(options, loaded, _choose_max_model_len(options, loaded))
    adapters = make_adapter_pool(options.adapters, loaded, scheduler.max_num_batched_tokens)
    if adapters is not None:
        scheduler = dataclasses.replace(
            scheduler, max_num_adapters=adapters.num_slots, loads_adapters=True
        )
    return RunnerSpec(
        loaded=loaded,
        options=options,
        config=RunnerConfig(
            model=loaded.model,
            ops=loaded.ops,
            num_blocks=1,
            block_size=options.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_drafts=scheduler.max_num_drafts,
            dtype=loaded.dtype,
            kv_dtype=cache_dtype,
            eos_token_ids=files.eos_token_ids,
            adapters=adapters,
            draft=loaded.draft,
            encoder=loaded.encoder,
            logits_processors=logits_processors,
            reports_processed=options.logprobs_mode.startswith("processed"),
            reports_logits=options.logprobs_mode.endswith("logits"),
            pooler=loaded.pooler,
            collectives=loaded.collectives,
            stage=None if num_stages == 1 else _stage_of(loaded),
        ),
        scheduler=scheduler,
        on_device=loaded.traits.runs_ahead,
    )


def _choose_max_model_len(options: EngineOptions, loaded: LoadedModel) -> int:
    limit = loaded.model.spec.max_model_len
    if options.max_model_len is None and limit > MOST_TOKENS:
        logger.warning(
            "max_model_len is %d, not the model's %d: longer requests need --max-model-len",
            MOST_TOKENS,
            limit,
        )
    longest = min(limit, loaded.max_seq_length or MOST_TOKENS, MOST_TOKENS)
    max_model_len = options.max_model_len or longest
    if max_model_len > limit:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}, the model was made for {limit}; lower it"
        )
    return max_model_len


def _cache_dtype(options: EngineOptions, loaded: LoadedModel) -> torch.dtype:
    has_latents = any(isinstance(kept, Latent) for kept in loaded.model.spec.layers)
    keeps_bytes = loaded.computes_in_bytes and not has_latents
    name = options.kv_cache_dtype
    cache_dtype = choose_cache_dtype(name, loaded.numbers, keeps_bytes=keeps_bytes)
    if has_latents and cache_dtype.itemsize == 1:
        raise ConfigurationError(
            f"--kv-cache-dtype {name}: {loaded.architecture} caches latents, which are not kept in "
            "8 bits; use auto or bfloat16"
        )
    if loaded.model_impl == "transformers" and cache_dtype != loaded.dtype:
        raise ConfigurationError(
            f"--kv-cache-dtype {options.kv_cache_dtype} needs our own model code, and "
            f"{loaded.architecture} runs through transformers'; leave it at auto"
        )
    return cache_dtype


def _plan_scheduler(
    options: EngineOptions, loaded: LoadedModel, max_model_len: int
) -> SchedulerConfig:
    """The scheduler's settings, without adapters."""
    runs_ahead, num_stages = loaded.traits.runs_ahead, loaded.collectives.parallel.pp_size
    has_fewer_bits = loaded.is_quantised or loaded.numbers.weights == "bfloat16"
    defaults = defaults_of(loaded.ops.device, has_fewer_bits=has_fewer_bits)
    most_in_flight = (GPUModelRunner if runs_ahead else CPUModelRunner).max_steps_in_flight
    num_drafts = options.speculation.max_drafts
    # of grammars; on a GPU they would take memory and graphs from those who have none
    forced_tokens = 0 if runs_ahead else _FORCED_TOKENS
    max_num_seqs = options.scheduling.max_num_seqs or defaults.max_num_seqs
    most_a_step, most_shared = defaults.max_num_batched_tokens, defaults.max_num_shared_tokens
    if loaded.has_host_experts:
        most_a_step = defaults_of(torch.device("cpu")).max_num_batched_tokens
    if loaded.draft is not None:
        most_in_flight = 1  # the next step waits for the drafts of the last one
    if is_encoder := isinstance(loaded.model, AnyEncoder):
        most_in_flight = EncoderRunner.max_steps_in_flight
        most_a_step, most_shared = max(_ENCODER_TOKENS, max_model_len), None
    given = options.scheduling
    if given.max_num_batched_tokens is not None or given.slo_tpot_ms is not None:
        most_shared = None
    elif num_stages > 1 or any(
        layer.reach and not layer.is_sparse for layer in loaded.model.spec.layers
    ):
        # the more chunks a prompt has, the more stages are at work, and the fewer blocks it needs
        # of a sliding window's
        most_a_step, most_shared = most_shared or most_a_step, None
    scheduler = options.scheduling.resolve(
        num_speculative_tokens=num_drafts,
        max_num_drafts=min(_MOST_DRAFTS, (num_drafts or forced_tokens) * max_num_seqs),
        max_num_batched_tokens=most_a_step,
        max_num_shared_tokens=most_shared,
        max_num_seqs=defaults.max_num_seqs,
        max_model_len=max_model_len,
        num_lookahead_slots=max(
            (options.scheduling.num_decode_steps or 1) - 1,
            num_drafts if loaded.draft is not None else 0,
        ),
        max_steps_in_flight=num_stages if num_stages > 1 else most_in_flight,
        computes_in_order=loaded.traits.computes_in_order,
        pipeline_parallel_size=num_stages,
    )
    scheduler = with_encoder_sizes(options, loaded, scheduler)
    if is_encoder:
        if scheduler.max_num_batched_tokens < max_model_len:
            raise ConfigurationError(
                f"--max-num-batched-tokens is {scheduler.max_num_batched_tokens}, and an encoder "
                f"computes a prompt of up to {max_model_len} tokens in one step; raise it, or "
                "lower --max-model-len"
            )
        # which cuts no prompt that a step has room for
        scheduler = dataclasses.replace(scheduler, batching="prefill-first")
    return scheduler


def _stage_of(loaded: LoadedModel) -> Stage:
    return decoder_of(loaded.model, "stages").stage


def resolve_config(runner: RunnerSpec, files: ModelFiles, *, address: str) -> EngineConfig:
    """The configuration in force. On a GPU the largest step is run, to see what it takes.

    Raises:
        ConfigurationError: sizes that contradict each other or the memory.
        CacheTooSmall: memory does not hold a useful cache.
    """
    options, loaded, scheduler = runner.options, runner.loaded, runner.scheduler
    layout, adapters = runner.config.layout, runner.config.adapters
    request_blocks = RequestBlocks(
        layout.group_specs,
        scheduler.max_chunk,
        options.block_size,
        scheduler.num_lookahead_slots,
        encoder_blocks(loaded.model, options.block_size),
    )
    is_encoder = isinstance(loaded.model, AnyEncoder)
    pools = PoolShares(
        pool_bytes=layout.pool_bytes,
        request=request_blocks,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        watermark=options.watermark,
    )
    num_blocks = 0 if is_encoder else _choose_num_blocks(runner, pools)
    num_host_blocks = choose_num_host_blocks(
        options.host_cache_memory,
        pools,
        num_blocks=num_blocks,
        cache_is_on_host=loaded.traits.is_host,
    )
    return EngineConfig(
        model=options.model_name or files.name,
        architecture=loaded.architecture,
        model_impl=loaded.model_impl,
        dtype=loaded.numbers.name,
        dtype_reason=loaded.numbers.reason,
        instruction_set=loaded.ops.instruction_set,
        weights=loaded.weights,
        kv_cache_dtype=dtype_name(runner.config.kv_dtype),
        device=loaded.ops.device.type,
        tensor_parallel_size=options.parallel.tensor_parallel_size,
        load_format=options.load_format,
        batch_invariant=options.batch_invariant,
        capture_at_start=options.capture_at_start,
        enforce_eager=not runner.uses_graphs,
        num_threads=loaded.ops.num_threads,
        num_threads_reason=_threads_reason(options, loaded.ops),
        block_size=options.block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=layout.num_bytes(num_blocks),
        num_host_blocks=num_host_blocks,
        host_cache_bytes=layout.num_bytes(num_host_blocks),
        enable_prefix_caching=options.enable_prefix_caching
        and not (is_encoder or request_blocks.num_encoder_blocks),
        state_checkpoint_interval=checkpoint_interval(options.state_checkpoint_interval, pools),
        watermark=options.watermark,
        max_loras=0 if adapters is None else adapters.num_slots,
        max_lora_rank=0 if adapters is None else adapters.max_rank,
        adapter_bytes=0 if adapters is None else adapters.num_bytes,
        max_logprobs=options.max_logprobs,
        logprobs_mode=options.logprobs_mode,
        logits_processors=options.logits_processors,
        address=address,
        max_clients=options.max_clients,
        max_prompt_embeds_bytes=options.prompt_embeds_bytes,
        isolate_tenants=options.security.isolate_tenants,
        drain_timeout_s=options.drain_timeout,
        speculative=options.speculation.speculative,
        trace=None if options.trace is None else str(options.trace.absolute()),
        scheduler=scheduler
        if is_encoder
        else dataclasses.replace(
            scheduler,
            max_model_len=fit_max_model_len(
                request_blocks,
                num_blocks=num_blocks,
                watermark=options.watermark,
                max_model_len=scheduler.max_model_len,
                is_asked_for=options.max_model_len is not None,
            ),
        ),
    )


def _threads_reason(options: EngineOptions, ops: Operations) -> str:
    try:
        threads = choose_threads(options.num_threads, by_node=options.numa is not None)
    except WrongNumberOfThreads as error:
        raise ConfigurationError(str(error)) from error
    if options.numa is not None and not (ops.device.type == "cpu" and any(threads.node_of_cpu)):
        logger.warning(
            "--numa distribute has no effect: it needs a CPU engine with a thread for each core of "
            "two nodes of memory or more; leave it out"
        )
    return threads.reason if ops.device.type == "cpu" and threads.count == ops.num_threads else ""


def _choose_num_blocks(runner: RunnerSpec, pools: PoolShares) -> PoolSizes:
    options, scheduler = runner.options, runner.scheduler
    device = runner.loaded.ops.device
    memory: HostMemory | DeviceMemory
    if runner.loaded.traits.is_host:
        memory = HostMemory(runner.loaded.mapped_bytes)
        step_bytes = runner.loaded.step_bytes(
            scheduler.max_num_batched_tokens, runner.config.max_num_logits
        )
        if runner.config.adapters is not None:
            step_bytes += runner.config.adapters.num_bytes  # taken as adapters come
    else:
        meter = CudaMeter(device)
        memory = read_device_memory(meter)
        step_bytes = runner.measure_step_bytes(meter)
    return choose_num_blocks(
        memory,
        pools,
        step_bytes=step_bytes + encoder_bytes(runner.loaded, scheduler),
        num_blocks=options.num_blocks,
        kv_cache_memory=options.kv_cache_memory,
        memory_fraction=options.memory_fraction or defaults_of(device).memory_fraction,
    )
