"""Builds the engine from its options and an open model: device, weights, sizes, parts, in order."""

import dataclasses
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from engine_core.block_transfer import TransferStore
from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.errors import ConfigurationError, StartupError, WorkerLost
from engine_core.kv_cache import PlaceholderKVCacheManager
from engine_core.lifecycle import Lifecycle
from engine_core.logits_processors import ServedVocabulary
from engine_core.model_files import ModelFiles, ModelFilesError, unreadable
from engine_core.model_runner.cpu.encoder_runner import EncoderRunner
from engine_core.models import ModelError
from engine_core.observers.base import RequestLog, StepObserver
from engine_core.observers.trace import TraceWriter
from engine_core.options.checks import check_device
from engine_core.options.engine import EngineOptions
from engine_core.prefix_store import PrefixStore
from engine_core.scheduler import Scheduler
from engine_core.scheduler.rules.token_rules import TokenRules
from engine_core.server.clients import ClientRegistry
from engine_core.server.inbox import Handshake, Inbox
from engine_core.server.outbox import Outbox
from engine_core.server.prompt_embeds import PromptEmbedsReader
from engine_core.server.transport import ZmqTransport
from engine_core.server.validation import RequestValidator
from engine_core.startup.adapters import open_adapters
from engine_core.startup.before_torch import OpenModel
from engine_core.startup.block_transfer import disaggregation_info, open_block_transfer
from engine_core.startup.cache_pages import num_blocks_ahead, populate_cache
from engine_core.startup.device import choose_device
from engine_core.startup.draft_model import load_with_draft
from engine_core.startup.encoder_decoder import cache_manager_of, encoder_info
from engine_core.startup.logits_processors import load_processors
from engine_core.startup.multimodal import make_reader, multimodal_info, text_only_note
from engine_core.startup.phases import StartPhases
from engine_core.startup.prefix_store import open_prefix_store
from engine_core.startup.ranks import OneRank, RankZero
from engine_core.startup.resolve import plan_runner
from engine_core.startup.runner_spec import Runner, RunnerSpec, prepare_ahead
from engine_core.startup.served_model import ServedModel
from engine_core.structured_output.manager import Compiler, StructuredOutputs
from engine_core.workers.group import WorkerGroup
from kernels.compile_counter import CompileCounter, watch_triton
from kernels.cpu.weight_memory import WEIGHT_MEMORY
from protocol.outputs import ModelInfo
from protocol.prompt_embeds import PromptEmbedsInfo

logger = logging.getLogger(__name__)

BlockStore = PrefixStore | TransferStore

HEARTBEAT_S = 0.25
"""Longest silence towards a client, so that a dead one is found within that time."""


def build_engine(
    options: EngineOptions,
    opened: OpenModel,
    transport: ZmqTransport,
    lifecycle: Lifecycle,
    phases: StartPhases,
    group: WorkerGroup | None = None,
) -> tuple[EngineCore, EngineConfig]:
    """Load the model and build everything around it. `group`: of workers that run it with this
    process. Raises StartupError: with one line for the operator."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    device = choose_device(options.device)
    check_device(options, device.type)
    try:
        ranks = OneRank() if group is None else RankZero(group)
        phases.enter("weights")
        options, device = ranks.take_place(options, device, opened.files)
        compilations = CompileCounter()
        loaded = load_with_draft(options, opened.files, device, ranks.collectives)
        if loaded.ops.device.type == "cuda":
            watch_triton(compilations)  # for as long as this process lives
        if loaded.is_packed:
            # what is left to torch is small, and its threads would take turns on the same cores
            # with those of the native library
            torch.set_num_threads(1)
        WEIGHT_MEMORY.give_back()
        ranks.loaded()
        phases.enter("cache")
        vocab_size, tokenizer = loaded.model.kv_cache_spec.vocab_size, opened.tokenizer
        text = None if tokenizer is None else tokenizer.tokenizer_json.decode()
        vocabulary = ServedVocabulary(vocab_size, opened.files.eos_token_ids, text)
        processors = load_processors(options.logits_processors, vocabulary)
        runner_spec = plan_runner(options, opened.files, loaded, processors)
        config = ranks.resolve(runner_spec, opened.files, transport.address)
        # to a person at a terminal it is noise
        level = logging.DEBUG if sys.stderr.isatty() else logging.INFO
        logger.log(level, "configuration: %s", config)
        about_cache = options, opened.files, loaded, runner_spec.config
        store = open_prefix_store(*about_cache) or open_block_transfer(*about_cache)
        structured_outputs = _structured_outputs(opened, runner_spec)
        runner = _warm_runner(runner_spec, config, compilations, phases, store)
        ranks.serving()
        core = _assemble(
            opened,
            runner_spec,
            config,
            runner,
            transport,
            lifecycle,
            compilations,
            store,
            structured_outputs,
            ranks,
        )
        return core, config
    except WorkerLost as error:
        kind = ConfigurationError if error.is_wrong_option else StartupError
        raise kind(str(error)) from error
    except (ModelFilesError, ModelError) as error:
        raise StartupError(str(error)) from error
    except OSError as error:  # a file that has gone, or that this user may not read
        if error.filename is None:
            raise
        raise StartupError(unreadable(error)) from error
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ", 1)[0]
        raise StartupError(
            f"the GPU has not enough memory for the weights and the largest step ({reason}); lower "
            "--max-model-len, --max-num-batched-tokens or --max-num-seqs, free the GPU, or serve a "
            "smaller model"
        ) from error
    except MemoryError as error:
        raise StartupError(
            f"there is not enough memory ({error}); lower --max-model-len, --max-num-seqs or "
            "--kv-cache-memory, or serve a smaller model"
        ) from error


def _warm_runner(
    runner_spec: RunnerSpec,
    config: EngineConfig,
    compilations: CompileCounter,
    phases: StartPhases,
    store: BlockStore | None,
) -> Runner:
    """Nothing that it can launch is left to be compiled."""
    runner = runner_spec.build(
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        max_model_len=config.scheduler.max_model_len,
    )
    if store is not None:
        assert not isinstance(runner, EncoderRunner)
        runner.storage.attach_disk(store)
    phases.enter("warm_up")
    runner_spec.warm_up(runner)
    compilations.mark_ready()
    phases.enter("serving")
    if compilations.num_compilations:
        logger.info(
            "warm after %.1f s; %d kernels were compiled or loaded",
            phases.spent_s()["warm_up"],
            compilations.num_compilations,
        )
    return runner


def _assemble(
    opened: OpenModel,
    runner_spec: RunnerSpec,
    config: EngineConfig,
    runner: Runner,
    transport: ZmqTransport,
    lifecycle: Lifecycle,
    compilations: CompileCounter,
    store: BlockStore | None,
    structured_outputs: StructuredOutputs | None,
    ranks: OneRank,
) -> EngineCore:
    vocab_size = runner_spec.config.vocab_size
    groups = runner_spec.config.layout.group_specs
    kv_cache = (
        PlaceholderKVCacheManager()
        if not config.num_blocks
        else cache_manager_of(runner_spec.loaded.model)(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            groups=groups,
            enable_prefix_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            num_host_blocks=config.num_host_blocks,
            disk=None if store is None else store.tier,
        )
    )
    if runner_spec.loaded.ops.device.type == "cpu" and not isinstance(runner, EncoderRunner):
        is_given = runner_spec.options.kv_cache_memory is not None
        populate_cache(
            runner.storage.device_tensors,
            config.num_blocks + 1 if is_given else num_blocks_ahead(runner.config),
            lambda: kv_cache.num_blocks_in_use + kv_cache.num_blocks_cached,
        )
    pooler = runner_spec.loaded.pooler
    # Besides the configuration a replay needs these.
    replayed = {
        "sliding_windows": [group.sliding_window for group in groups],
        "eos_token_ids": list(opened.files.eos_token_ids),
        "pooler": None if pooler is None else dataclasses.asdict(pooler.config),
    }
    executor = ranks.executor(runner)

    def while_quiet() -> None:
        prepare_ahead(executor.runner)
        if structured_outputs is not None:
            structured_outputs.prepare()

    transfer_store = store if isinstance(store, TransferStore) else None
    observers: list[StepObserver] = [] if store is None else [store]
    if logger.isEnabledFor(logging.DEBUG):
        observers.append(RequestLog())
    if config.trace is not None:
        observers.append(_trace_writer(config.trace, config, replayed))
    scheduler = Scheduler(
        config.scheduler,
        kv_cache,
        proposer=runner_spec.options.speculation.make_proposer(),
        draft_method=runner_spec.options.speculation.speculative or "grammar",
        constraints=TokenRules(structured_outputs, vocab_size=vocab_size),
        transfers=None if transfer_store is None else transfer_store.transfers,
    )
    pool = runner_spec.config.adapters
    adapters = open_adapters(runner_spec.options.adapters, pool, scheduler, config.model)
    if adapters is not None:
        observers.append(adapters)
    clients = ClientRegistry()
    outbox = Outbox(transport, clients, heartbeat_s=HEARTBEAT_S)
    embeds = _prompt_embeds_reader(config, runner_spec)
    handshake = _handshake(
        opened, config, vocab_size, runner_spec, None if embeds is None else embeds.info
    )
    handshake.use_disaggregation(disaggregation_info(runner_spec.options, transfer_store))
    if adapters is not None:
        handshake.use_adapters(adapters.infos)
    return EngineCore(
        inbox=Inbox(
            transport,
            clients,
            outbox,
            idle_wait_s=HEARTBEAT_S,
            welcome=handshake.welcome,
            max_clients=config.max_clients,
            rights=transport.rights,
            while_quiet=while_quiet,
        ),
        outbox=outbox,
        clients=clients,
        scheduler=scheduler,
        executor=executor,
        lifecycle=lifecycle,
        validator=RequestValidator(
            max_model_len=config.scheduler.max_model_len,
            vocab_size=vocab_size,
            max_logprobs=config.max_logprobs,
            max_num_seqs=config.scheduler.max_num_seqs,
            scheduling_policy=config.scheduler.scheduling_policy,
            logits_processors=runner_spec.config.logits_processors,
            prompt_embeds=embeds,
            pooler=None if pooler is None else pooler.config,
            generates=runner_spec.loaded.generates,
            fetches_blocks=transfer_store is not None and transfer_store.fetcher is not None,
        ),
        eos_token_ids=opened.files.eos_token_ids,
        observers=observers,
        compilations=compilations,
        model_host=ranks.model_host(
            ServedModel(runner_spec, config, opened.files, executor, runner, store)
        ),
        on_weights=handshake.use_weights,
        adapters=adapters,
        on_adapters=handshake.use_adapters,
        isolates_tenants=config.isolate_tenants,
        structured_outputs=structured_outputs,
        transfers=transfer_store,
        multimodal=make_reader(runner_spec.options, runner_spec.loaded),
        cache=kv_cache if config.num_blocks else None,
    )


def _structured_outputs(opened: OpenModel, runner_spec: RunnerSpec) -> StructuredOutputs | None:
    tokenizer, vocab_size = opened.tokenizer, runner_spec.config.vocab_size
    if tokenizer is None or not runner_spec.loaded.generates:
        return None

    def make_compiler() -> Compiler:
        from engine_core.structured_output.compiler import GrammarCompiler

        return GrammarCompiler(
            tokenizer.tokenizer_json,
            vocab_size=vocab_size,
            eos_token_ids=opened.files.eos_token_ids,
        )

    return StructuredOutputs(make_compiler, vocab_size=vocab_size)


def _trace_writer(path: str, config: EngineConfig, replayed: dict[str, Any]) -> TraceWriter:
    try:
        return TraceWriter(
            Path(path),
            started_s=time.monotonic(),
            model=config.model,
            config=dataclasses.asdict(config) | replayed,
            max_steps_in_flight=config.scheduler.max_steps_in_flight,
        )
    except OSError as error:
        raise ConfigurationError(
            f"--trace: cannot write {path}: {error.strerror}; choose another file"
        ) from error


def _prompt_embeds_reader(
    config: EngineConfig, runner_spec: RunnerSpec
) -> PromptEmbedsReader | None:
    if not config.max_prompt_embeds_bytes:
        return None
    hidden_size = runner_spec.config.model.kv_cache_spec.hidden_size
    if not hidden_size:
        raise ConfigurationError(
            f"--enable-prompt-embeds: {config.architecture} does not run from embeddings; omit it"
        )
    return PromptEmbedsReader(
        PromptEmbedsInfo(hidden_size=hidden_size, max_bytes=config.max_prompt_embeds_bytes),
        block_size=config.block_size,
        largest_number=torch.finfo(runner_spec.config.dtype).max,
    )


def _handshake(
    opened: OpenModel,
    config: EngineConfig,
    vocab_size: int,
    spec: RunnerSpec,
    prompt_embeds: PromptEmbedsInfo | None,
) -> Handshake:
    loaded = spec.loaded
    files, ops, pooler = opened.files, loaded.ops, loaded.pooler
    instruction_set = ops.name
    if ops.device.type == "cuda":
        instruction_set += f" {ops.instruction_set}"
    else:
        instruction_set += f", torch {torch.backends.cpu.get_cpu_capability()}"
    model = ModelInfo(
        name=config.model,
        architecture=config.architecture,
        fingerprint=files.fingerprint,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=vocab_size,
        dtype=config.dtype,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        eos_token_ids=files.eos_token_ids,
        max_logprobs=config.max_logprobs,
        max_num_seqs=config.scheduler.max_num_seqs,
        default_sampling=recommended_sampling(files.generation_config),
        instruction_set=instruction_set,
        formats=", ".join(
            [config.weights, f"KV cache {config.kv_cache_dtype}", config.model_impl]
            + [f"logits processor {name}" for name in config.logits_processors]
            + text_only_note(files, spec.loaded)
        ),
        file_format=files.weight_files[0].suffix[1:] if files.weight_files else "",
        file_bytes=sum(file.stat().st_size for file in files.weight_files),
        num_weights=_num_weights(files),
        encoder=encoder_info(spec.loaded.model, files.config, files.generation_config),
        prompt_embeds=prompt_embeds,
        multimodal=multimodal_info(spec.options, files, spec.loaded),
        tasks=("generate",) * loaded.generates + (() if pooler is None else pooler.config.tasks),
        prompts={} if files.modules is None else files.modules.prompts,
        labels=files.labels if pooler is not None and pooler.config.num_labels else (),
        default_prompt_name=None if files.modules is None else files.modules.default_prompt_name,
        has_segments=files.is_encoder,
    )
    return Handshake(model, opened.tokenizer, heartbeat_s=HEARTBEAT_S)


def _num_weights(files: ModelFiles) -> int:
    """0: several are packed into an element of the files."""
    is_packed = files.quantised_types and any(f.suffix != ".gguf" for f in files.weight_files)
    return 0 if is_packed or not files.weight_files else files.num_weights


def recommended_sampling(generation_config: dict[str, Any]) -> dict[str, float]:
    """The sampling values of generation_config.json that this engine knows."""
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {
        name: float(value)
        for name in known
        if isinstance(value := generation_config.get(name), int | float)
    }
