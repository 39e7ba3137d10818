"""Builds the engine from options: model, cache, scheduler, loop. Resolves every "auto".

The one place that sees all parts; nothing here runs after start-up.
"""

import logging
from typing import Any

import torch

from engine_core.admission import Limits
from engine_core.cache_memory import CacheDemand, choose_num_blocks, choose_num_host_blocks
from engine_core.capacity import RequestNeed, fit_to_cache
from engine_core.clients import ClientRegistry
from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.errors import ConfigurationError, StartupError
from engine_core.executor import InProcessExecutor
from engine_core.inbox import Inbox
from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.lifecycle import Lifecycle
from engine_core.model_files import ModelFiles, ModelFilesError, open_model_files
from engine_core.model_loading import LoadedModel, load_any_model
from engine_core.model_runner.cache_layout import CacheLayout, plan_cache_layout
from engine_core.model_runner.runner import ModelRunner
from engine_core.models import ModelError
from engine_core.options import EngineOptions
from engine_core.outbox import Outbox
from engine_core.scheduler import build_scheduler
from engine_core.scheduler_setup import kv_cache_of, recorder_of, scheduler_config_of
from engine_core.transport import EngineSocket
from engine_core.welcome import WelcomeDesk, fingerprint_of
from protocol.outputs import ModelInfo, TokenizerInfo

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""Longest silence towards a client, so that a dead one is found within that time."""

_DEFAULT_TOKENS_A_STEP = 256
"""On a CPU: near the matrix product's best rate, and still a short step."""
_DEFAULT_NUM_SEQS = 128


def start_engine(
    options: EngineOptions, socket: EngineSocket, lifecycle: Lifecycle
) -> tuple[EngineCore, EngineConfig]:
    """Load the model and build everything around it.

    Raises:
        StartupError: with one line for the operator.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    try:
        files = open_model_files(options.model, tokenizer=options.tokenizer, report=logger.info)
        loaded = load_any_model(
            files,
            dtype=options.dtype,
            model_impl=options.model_impl,
            max_model_len=options.max_model_len,
        )
        layout = plan_cache_layout(loaded.model.kv_cache_spec.sliding_windows)
        config = _resolve(options, files, loaded, layout, socket.address)
        logger.info("configuration: %s", config)
        return _assemble(files, loaded, layout, config, socket, lifecycle), config
    except (ModelFilesError, ModelError) as error:
        raise StartupError(str(error)) from error


def _resolve(
    options: EngineOptions,
    files: ModelFiles,
    loaded: LoadedModel,
    layout: CacheLayout,
    address: str,
) -> EngineConfig:
    spec = loaded.model.kv_cache_spec
    max_model_len = options.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}, the model was made for {spec.max_model_len}; "
            "lower it"
        )
    max_num_seqs = options.max_num_seqs or _DEFAULT_NUM_SEQS
    max_num_batched_tokens = options.max_num_batched_tokens or _DEFAULT_TOKENS_A_STEP
    element_bytes = loaded.dtype.itemsize
    slot_bytes = 2 * spec.num_kv_heads * spec.head_size * element_bytes
    block_bytes = layout.num_tensors * options.block_size * slot_bytes
    max_chunk_size = min(options.max_chunk_size or max_num_batched_tokens, max_num_batched_tokens)
    need = RequestNeed(_groups(layout), max_chunk_size, options.block_size)
    num_blocks = choose_num_blocks(
        CacheDemand(
            block_bytes=block_bytes,
            blocks_per_request=need.num_blocks(max_model_len),
            max_num_seqs=max_num_seqs,
            step_bytes=loaded.step_bytes(max_num_batched_tokens, max_num_seqs),
        ),
        num_blocks=options.num_blocks,
        kv_cache_memory=options.kv_cache_memory,
        memory_fraction=options.memory_fraction,
    )
    num_host_blocks = choose_num_host_blocks(
        options.host_cache_memory, block_bytes=block_bytes, num_blocks=num_blocks
    )
    return EngineConfig(
        model=options.model_name or files.name,
        architecture=loaded.architecture,
        model_impl=loaded.model_impl,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device="cpu",
        num_threads=torch.get_num_threads(),
        max_model_len=fit_to_cache(
            need,
            num_blocks=num_blocks,
            watermark=options.watermark,
            max_model_len=max_model_len,
            is_asked_for=options.max_model_len is not None,
        ),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_chunk_size=max_chunk_size,
        block_size=options.block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=num_blocks * block_bytes,
        num_host_blocks=num_host_blocks,
        host_cache_bytes=num_host_blocks * block_bytes,
        enable_prefix_caching=options.enable_prefix_caching,
        watermark=options.watermark,
        max_logprobs=options.max_logprobs,
        address=address,
        drain_timeout_s=options.drain_timeout,
        record=None if options.record is None else str(options.record.absolute()),
        step_composition=options.step_composition,
        prefill_delay_factor=options.prefill_delay_factor or 0.0,
        preemption_mode=options.preemption_mode,
        scheduling_policy=options.scheduling_policy,
        force_preemption=options.force_preemption is not False,
        priority_min_gain=options.priority_min_gain or 1,
        priority_ageing_s=options.priority_ageing,
        tenant_weights=options.tenant_weights(),
        target_tpot_ms=options.target_tpot_ms,
        target_ttft_ms=options.target_ttft_ms,
        max_partial_prefills=options.max_partial_prefills,
        max_long_partial_prefills=options.max_long_partial_prefills,
        long_prefill_threshold=options.long_prefill_threshold,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
    )


def _groups(layout: CacheLayout) -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec(group.sliding_window) for group in layout.groups]


def _assemble(
    files: ModelFiles,
    loaded: LoadedModel,
    layout: CacheLayout,
    config: EngineConfig,
    socket: EngineSocket,
    lifecycle: Lifecycle,
) -> EngineCore:
    runner = ModelRunner(
        model=loaded.model,
        ops=loaded.ops,
        layout=layout,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        dtype=loaded.dtype,
        eos_token_ids=files.eos_token_ids,
    )
    scheduler_config, groups = scheduler_config_of(config), _groups(layout)
    clients = ClientRegistry()
    outbox = Outbox(socket, clients, heartbeat_s=HEARTBEAT_S)
    desk = _welcome_desk(files, config, loaded.model.kv_cache_spec.vocab_size)
    inbox = Inbox(socket, clients, outbox, idle_wait_s=HEARTBEAT_S, welcome=desk.welcome)
    return EngineCore(
        inbox=inbox,
        outbox=outbox,
        clients=clients,
        scheduler=build_scheduler(scheduler_config, kv_cache_of(config, groups)),
        executor=InProcessExecutor(runner),
        lifecycle=lifecycle,
        limits=Limits(
            max_model_len=config.max_model_len,
            vocab_size=loaded.model.kv_cache_spec.vocab_size,
            max_logprobs=config.max_logprobs,
            max_num_seqs=config.max_num_seqs,
            scheduling_policy=config.scheduling_policy,
        ),
        eos_token_ids=files.eos_token_ids,
        recorder=recorder_of(config, scheduler_config, groups, files.eos_token_ids),
    )


def _welcome_desk(files: ModelFiles, config: EngineConfig, vocab_size: int) -> WelcomeDesk:
    model = ModelInfo(
        name=config.model,
        architecture=config.architecture,
        fingerprint=files.fingerprint,
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        dtype=config.dtype,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        eos_token_ids=files.eos_token_ids,
        max_logprobs=config.max_logprobs,
        default_sampling=recommended_sampling(files.generation_config),
    )
    found = files.tokenizer()
    if found is None:
        logger.warning("the model has no tokenizer: clients must send token ids")
        return WelcomeDesk(model=model, tokenizer=None, tokenizer_json=b"", heartbeat_s=HEARTBEAT_S)
    tokenizer = TokenizerInfo(
        fingerprint=fingerprint_of(found.tokenizer_json),
        tokenizer_json=None,
        chat_template=found.chat_template,
        special_tokens=found.special_tokens,
    )
    return WelcomeDesk(
        model=model,
        tokenizer=tokenizer,
        tokenizer_json=found.tokenizer_json,
        heartbeat_s=HEARTBEAT_S,
    )


def recommended_sampling(generation_config: dict[str, Any]) -> dict[str, float]:
    """The sampling values of generation_config.json that this engine knows."""
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {
        name: float(value)
        for name in known
        if isinstance(value := generation_config.get(name), int | float)
    }
