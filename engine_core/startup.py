"""Builds the engine from options: model, cache, scheduler, loop. Resolves every "auto".

The one place that sees all parts; nothing here runs after start-up.
"""

import bisect
import dataclasses
import logging
from typing import Any

import torch

from engine_core.admission import Limits
from engine_core.cache_memory import CacheDemand, choose_num_blocks
from engine_core.clients import ClientRegistry
from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.errors import CacheTooSmall, ConfigurationError, StartupError
from engine_core.executor import InProcessExecutor
from engine_core.inbox import Inbox
from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.lifecycle import Lifecycle
from engine_core.model_files import ModelFiles, ModelFilesError, open_model_files
from engine_core.model_loading import LoadedModel, load_any_model
from engine_core.model_runner.cache_layout import CacheLayout, plan_cache_layout
from engine_core.model_runner.runner import ModelRunner
from engine_core.models import ModelError
from engine_core.options import EngineOptions
from engine_core.outbox import Outbox
from engine_core.scheduler import Scheduler
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
    need = _RequestNeed(layout, max_chunk_size, options.block_size)
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
    return EngineConfig(
        model=options.model_name or files.name,
        architecture=loaded.architecture,
        model_impl=loaded.model_impl,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device="cpu",
        num_threads=torch.get_num_threads(),
        max_model_len=_fit_to_cache(options, need, max_model_len, num_blocks),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_chunk_size=max_chunk_size,
        block_size=options.block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=num_blocks * block_bytes,
        enable_prefix_caching=options.enable_prefix_caching,
        watermark=options.watermark,
        max_logprobs=options.max_logprobs,
        address=address,
        drain_timeout_s=options.drain_timeout,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _RequestNeed:
    """Blocks that one request takes, over all groups."""

    layout: CacheLayout
    max_chunk_size: int
    block_size: int

    def num_blocks(self, num_tokens: int) -> int:
        """The most at once while so many tokens are computed."""
        return sum(
            KVCacheGroupSpec(group.sliding_window).num_peak_blocks(
                num_tokens, self.max_chunk_size, self.block_size
            )
            for group in self.layout.groups
        )

    def num_tokens(self, num_blocks: int, limit: int) -> int:
        """The most tokens, up to `limit`, that fit in so many blocks."""
        lengths = range(1, limit + 1)
        return bisect.bisect_right(lengths, num_blocks, key=self.num_blocks)


def _fit_to_cache(
    options: EngineOptions, need: _RequestNeed, max_model_len: int, num_blocks: int
) -> int:
    """A request of max_model_len must fit in an empty cache, or it could never finish.

    The model's own limit gives way to the cache; a limit that the operator asked for does not.
    """
    capacity = need.num_tokens(num_blocks, max_model_len)
    if capacity >= max_model_len:
        return max_model_len
    if options.max_model_len is not None:
        raise CacheTooSmall(
            f"{num_blocks} KV blocks hold a request of {capacity} tokens, --max-model-len is "
            f"{max_model_len}; lower it, or raise --num-blocks or --kv-cache-memory"
        )
    if capacity < 2:
        raise CacheTooSmall(
            f"{num_blocks} KV blocks do not hold a prompt token and an answer for the model's "
            f"{len(need.layout.groups)} cache groups; raise --num-blocks or --kv-cache-memory"
        )
    logger.warning(
        "max_model_len is %d, not the model's %d: that is what %d KV blocks hold; raise "
        "--kv-cache-memory or --num-blocks for more",
        capacity,
        max_model_len,
        num_blocks,
    )
    return capacity


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
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        dtype=loaded.dtype,
        eos_token_ids=files.eos_token_ids,
    )
    scheduler = Scheduler(
        kv_cache=KVCacheManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            groups=[KVCacheGroupSpec(group.sliding_window) for group in layout.groups],
            enable_prefix_caching=config.enable_prefix_caching,
            watermark=config.watermark,
        ),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_chunk_size=config.max_chunk_size,
    )
    clients = ClientRegistry()
    outbox = Outbox(socket, clients, heartbeat_s=HEARTBEAT_S)
    desk = _welcome_desk(files, config, loaded.model.kv_cache_spec.vocab_size)
    inbox = Inbox(socket, clients, outbox, idle_wait_s=HEARTBEAT_S, welcome=desk.welcome)
    return EngineCore(
        inbox=inbox,
        outbox=outbox,
        clients=clients,
        scheduler=scheduler,
        executor=InProcessExecutor(runner),
        lifecycle=lifecycle,
        limits=Limits(
            max_model_len=config.max_model_len,
            vocab_size=loaded.model.kv_cache_spec.vocab_size,
            max_logprobs=config.max_logprobs,
        ),
        eos_token_ids=files.eos_token_ids,
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
