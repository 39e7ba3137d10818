"""Builds the engine from its options and an open model: device, weights, sizes, parts, in order."""

import dataclasses
import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine_core.block_transfer import TransferStore
from engine_core.calls import BasicCalls
from engine_core.control import EngineControl
from engine_core.core import EngineCore
from engine_core.devices import traits_of
from engine_core.errors import ConfigurationError, StartupError, WorkerLost
from engine_core.executor import InProcessExecutor
from engine_core.kv_cache import KVCacheManager
from engine_core.lifecycle import Lifecycle
from engine_core.logits_processors import ServedVocabulary
from engine_core.model_files import ModelFilesError, unreadable
from engine_core.model_runner.encoder_runner import EncoderRunner
from engine_core.models.errors import ModelError
from engine_core.observers.base import CompileStatistics, RequestLog, StepObserver
from engine_core.observers.cache_publisher import CachePublisher
from engine_core.observers.live_view import LiveView
from engine_core.observers.scheduler_view import scheduler_view
from engine_core.observers.step_suspects import StepSuspects
from engine_core.observers.trace import TraceWriter
from engine_core.options.checks import check_device
from engine_core.options.engine import EngineOptions
from engine_core.prefix_store import PrefixStore
from engine_core.process.suspects import Suspects
from engine_core.scheduler import Scheduler
from engine_core.scheduler.rules.token_rules import TokenRules
from engine_core.server.clients import ClientRegistry
from engine_core.server.inbox import Inbox
from engine_core.server.outbox import Outbox
from engine_core.server.prompt_embeds import PromptEmbedsReader
from engine_core.server.request_reader import RequestReader
from engine_core.server.transport import ZmqTransport
from engine_core.server.validation import RequestValidator
from engine_core.startup.adapters import open_adapters
from engine_core.startup.before_torch import OpenModel
from engine_core.startup.block_transfer import disaggregation_info, open_block_transfer
from engine_core.startup.cache_pages import num_blocks_ahead, populate_cache
from engine_core.startup.config import EngineConfig
from engine_core.startup.device import choose_device
from engine_core.startup.draft_model import load_with_draft
from engine_core.startup.encoder_decoder import encoder_groups
from engine_core.startup.handshake import HEARTBEAT_S, make_handshake
from engine_core.startup.logits_processors import load_processors
from engine_core.startup.model_host import LocalModelHost
from engine_core.startup.multimodal import make_reader
from engine_core.startup.phases import StartPhases
from engine_core.startup.prefix_store import open_prefix_store
from engine_core.startup.ranks import OneRank, RankZero
from engine_core.startup.resolve import plan_runner
from engine_core.startup.runner_spec import Runner, RunnerSpec, prepare_ahead
from engine_core.startup.scheduler import build_scheduler
from engine_core.structured_output.manager import Compiler, StructuredOutputs
from engine_core.workers.group import WorkerGroup
from kernels.compile_counter import CompileCounter, watch_triton
from kernels.cpu.weight_memory import WEIGHT_MEMORY
from protocol.prompt_embeds import PromptEmbedsInfo

logger = logging.getLogger(__name__)

BlockStore = PrefixStore | TransferStore


def build_engine(
    options: EngineOptions,
    opened: OpenModel,
    transport: ZmqTransport,
    lifecycle: Lifecycle,
    phases: StartPhases,
    group: WorkerGroup | None = None,
    suspects: Suspects | None = None,
) -> tuple[EngineCore, EngineConfig]:
    """Load the model and build everything around it. Raises StartupError: with one line for the
    operator.

    Args:
        group: of workers that run the model with this process.
        suspects: requests that may have killed the engine before.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    device, device_reason = choose_device(options, opened.files)
    check_device(options, traits_of(device))
    try:
        ranks = OneRank() if group is None else RankZero(group)
        phases.enter("weights")
        options, device = ranks.take_place(options, device, opened.files)
        compilations = CompileCounter()
        loaded = load_with_draft(options, opened.files, device, ranks.collectives)
        if loaded.traits.compiles_kernels:
            watch_triton(compilations)  # for as long as this process lives
        if loaded.is_packed:
            # what is left to torch is small, and its threads would take turns on the same cores
            # with those of the native library
            torch.set_num_threads(1)
        WEIGHT_MEMORY.give_back()
        ranks.loaded()
        phases.enter("cache")
        vocab_size, tokenizer = loaded.model.spec.vocab_size, opened.tokenizer
        text = None if tokenizer is None else tokenizer.tokenizer_json.decode()
        vocabulary = ServedVocabulary(vocab_size, opened.files.eos_token_ids, text)
        processors = load_processors(options.logits_processors, vocabulary)
        runner_spec = plan_runner(options, opened.files, loaded, processors)
        config = ranks.resolve(runner_spec, opened.files, transport.address)
        config = dataclasses.replace(config, device_reason=device_reason)
        # to a person at a terminal it is noise
        level = logging.DEBUG if sys.stderr.isatty() else logging.INFO
        logger.log(level, "configuration: %s", config)
        about_cache = options, opened.files, loaded, runner_spec.config
        store = open_prefix_store(*about_cache) or open_block_transfer(*about_cache)
        structured_outputs = _structured_outputs(opened, runner_spec, suspects)
        runner = _warm_runner(runner_spec, config, compilations, phases, store)
        ranks.serving()
        assembly = _Assembly(opened, runner_spec, config, runner, store, structured_outputs, ranks)
        return assembly.core(transport, lifecycle, compilations, suspects), config
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Assembly:
    """An engine's parts, by subject. What is shared between subjects is given."""

    opened: OpenModel
    spec: RunnerSpec
    config: EngineConfig
    runner: Runner
    store: BlockStore | None
    structured_outputs: StructuredOutputs | None
    ranks: OneRank

    @property
    def transfers(self) -> TransferStore | None:
        return self.store if isinstance(self.store, TransferStore) else None

    def core(
        self,
        transport: ZmqTransport,
        lifecycle: Lifecycle,
        compilations: CompileCounter,
        suspects: Suspects | None,
    ) -> EngineCore:
        kv_cache = self._kv_cache()
        scheduler = self._scheduler(kv_cache)
        executor = self.ranks.executor(self.runner)
        embeds = _prompt_embeds_reader(self.config, self.spec)
        handshake = make_handshake(
            self.opened, self.config, self.spec, None if embeds is None else embeds.info
        )
        handshake.use_disaggregation(disaggregation_info(self.spec.options, self.transfers))
        clients = ClientRegistry()
        outbox = Outbox(transport, clients, heartbeat_s=HEARTBEAT_S)
        host = LocalModelHost(
            self.spec, self.config, self.opened.files, executor, self.runner, self.store
        )
        adapters = open_adapters(
            self.spec.options.adapters,
            self.spec.config.adapters,
            scheduler,
            self.config.model,
            handshake.use_adapters,
        )
        if adapters is not None:
            handshake.use_adapters(adapters.infos)
        parts = [
            *self._observers(),
            None if suspects is None else StepSuspects(suspects),
            BasicCalls(scheduler, clients, lifecycle),
            EngineControl(scheduler, lifecycle, self.ranks.model_host(host), handshake.use_weights),
            CompileStatistics(lambda: compilations.num_after_ready),
            adapters,
            self.structured_outputs,
            CachePublisher(kv_cache, outbox.offer, isolates_tenants=self.config.isolate_tenants)
            if self.config.num_blocks
            else None,
            LiveView(partial(scheduler_view, scheduler)),
        ]
        return EngineCore(
            inbox=Inbox(
                transport,
                clients,
                outbox,
                idle_wait_s=HEARTBEAT_S,
                welcome=handshake.welcome,
                max_clients=self.config.max_clients,
                rights=transport.rights,
                while_quiet=partial(_prepare, executor, self.structured_outputs),
            ),
            outbox=outbox,
            scheduler=scheduler,
            executor=executor,
            lifecycle=lifecycle,
            reader=self._reader(embeds),
            parts=[part for part in parts if part is not None],
        )

    def _kv_cache(self) -> KVCacheManager:
        config, spec = self.config, self.spec
        groups = spec.config.layout.group_specs if config.num_blocks else []
        kv_cache = KVCacheManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            groups=[*groups, *encoder_groups(spec.loaded.model)],
            enable_prefix_caching=config.enable_prefix_caching,
            checkpoint_interval=config.state_checkpoint_interval,
            watermark=config.watermark,
            num_host_blocks=config.num_host_blocks,
            disk=None if self.store is None else self.store.tier,
        )
        if spec.loaded.traits.is_host and not isinstance(self.runner, EncoderRunner):
            has_size, has_number = (
                each is not None for each in (spec.options.kv_cache_memory, spec.options.num_blocks)
            )
            for index, pool in enumerate(self.runner.storage.pools):
                populate_cache(
                    pool.device_blocks,
                    len(pool.device_blocks)
                    if has_size
                    else num_blocks_ahead(self.runner.config, index, is_given=has_number),
                    partial(kv_cache.num_blocks_filled, index),
                    is_spread=spec.options.numa is not None,
                )
        return kv_cache

    def _scheduler(self, kv_cache: KVCacheManager) -> Scheduler:
        speculation = self.spec.options.speculation
        return build_scheduler(
            self.config.scheduler,
            kv_cache,
            proposer=speculation.make_proposer(),
            draft_method=speculation.speculative or "grammar",
            constraints=TokenRules(self.structured_outputs, vocab_size=self.spec.config.vocab_size),
            transfers=None if self.transfers is None else self.transfers.transfers,
        )

    def _observers(self) -> list[StepObserver | None]:
        config, pooler = self.config, self.spec.loaded.pooler
        # Besides the configuration a replay needs these.
        replayed = {
            "groups": list(map(dataclasses.asdict, self.spec.config.layout.group_specs)),
            "eos_token_ids": list(self.opened.files.eos_token_ids),
            "pooler": None if pooler is None else dataclasses.asdict(pooler.config),
        }
        return [
            self.store,
            RequestLog() if logger.isEnabledFor(logging.DEBUG) else None,
            None if config.trace is None else _trace_writer(config.trace, config, replayed),
        ]

    def _reader(self, embeds: PromptEmbedsReader | None) -> RequestReader:
        config, spec, pooler = self.config, self.spec, self.spec.loaded.pooler
        return RequestReader(
            RequestValidator(
                max_model_len=config.scheduler.max_model_len,
                vocab_size=spec.config.vocab_size,
                max_logprobs=config.max_logprobs,
                max_num_seqs=config.scheduler.max_num_seqs,
                scheduling_policy=config.scheduler.scheduling_policy,
                logits_processors=spec.config.logits_processors,
                no_beams=""
                if config.logprobs_mode == "raw_logprobs"
                else f"--logprobs-mode {config.logprobs_mode}",
                pooler=None if pooler is None else pooler.config,
                generates=spec.loaded.generates,
                fetches_blocks=self.transfers is not None and self.transfers.fetcher is not None,
                serves_adapters=spec.config.adapters is not None,
                has_grammars=self.structured_outputs is not None,
            ),
            eos_token_ids=self.opened.files.eos_token_ids,
            isolates_tenants=config.isolate_tenants,
            prompt_embeds=embeds,
            multimodal=make_reader(spec.options, spec.loaded),
        )


def _prepare(executor: InProcessExecutor, structured_outputs: StructuredOutputs | None) -> None:
    """While nothing else is to do. Keeps nothing of an engine that sleeps."""
    prepare_ahead(executor.runner)
    if structured_outputs is not None:
        structured_outputs.prepare()


def _structured_outputs(
    opened: OpenModel, runner_spec: RunnerSpec, suspects: Suspects | None
) -> StructuredOutputs | None:
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

    return StructuredOutputs(make_compiler, vocab_size=vocab_size, suspects=suspects)


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
    hidden_size = runner_spec.config.model.spec.hidden_size
    if not hidden_size:
        raise ConfigurationError(
            f"--enable-prompt-embeds: {config.architecture} does not run from embeddings; omit it"
        )
    return PromptEmbedsReader(
        PromptEmbedsInfo(hidden_size=hidden_size, max_bytes=config.max_prompt_embeds_bytes),
        block_size=config.block_size,
        largest_number=torch.finfo(runner_spec.config.dtype).max,
    )
