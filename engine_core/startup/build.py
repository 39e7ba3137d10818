"""The engine's parts, put together around a loaded model: runner, scheduler, loop, welcome.

The one place that sees all of them; nothing here runs after start-up. Must not know options or
files' formats.
"""

import logging
from typing import Any

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.executor import InProcessExecutor
from engine_core.lifecycle import Lifecycle
from engine_core.scheduler import Scheduler
from engine_core.server.clients import ClientRegistry
from engine_core.server.handshake import Handshake, fingerprint_of
from engine_core.server.inbox import Inbox
from engine_core.server.outbox import Outbox
from engine_core.server.transport import ZmqTransport
from engine_core.server.validation import RequestValidator
from engine_core.startup.model_opening import OpenModel
from engine_core.startup.phases import StartPhases
from engine_core.startup.resolve import groups_of
from engine_core.startup.runner_spec import RunnerSpec
from engine_core.startup.scheduler_setup import kv_cache_of, scheduler_config_of, trace_of
from kernels.compile_counter import CompileCounter
from protocol.outputs import ModelInfo, TokenizerInfo

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""Longest silence towards a client, so that a dead one is found within that time."""


def assemble(
    opened: OpenModel,
    runner_spec: RunnerSpec,
    config: EngineConfig,
    transport: ZmqTransport,
    lifecycle: Lifecycle,
    compilations: CompileCounter,
    clock: StartPhases,
) -> EngineCore:
    """The engine, warm: nothing that it can launch is left to be compiled.

    Raises:
        ConfigurationError: the record's file cannot be written.
    """
    runner = runner_spec.build(
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        max_model_len=config.max_model_len,
    )
    clock.enter("warm_up")
    runner_spec.warm_up(runner)
    compilations.mark_ready()
    clock.enter("serving")
    if compilations.num_compilations:
        logger.info(
            "warm after %.1f s; %d kernels were compiled or loaded",
            clock.spent_s()["warm_up"],
            compilations.num_compilations,
        )
    files = opened.files
    executor = InProcessExecutor(runner)
    groups = groups_of(runner_spec.layout)
    scheduler_config = scheduler_config_of(config, max_steps_in_flight=executor.max_steps_in_flight)
    vocab_size = runner_spec.loaded.model.kv_cache_spec.vocab_size
    clients = ClientRegistry()
    outbox = Outbox(transport, clients, heartbeat_s=HEARTBEAT_S)
    desk = _handshake(opened, config, vocab_size)
    inbox = Inbox(transport, clients, outbox, idle_wait_s=HEARTBEAT_S, welcome=desk.welcome)
    return EngineCore(
        inbox=inbox,
        outbox=outbox,
        clients=clients,
        scheduler=Scheduler(scheduler_config, kv_cache_of(config, groups)),
        executor=executor,
        lifecycle=lifecycle,
        validator=RequestValidator(
            max_model_len=config.max_model_len,
            vocab_size=vocab_size,
            max_logprobs=config.max_logprobs,
            max_num_seqs=config.max_num_seqs,
            scheduling_policy=config.scheduling_policy,
        ),
        eos_token_ids=files.eos_token_ids,
        observers=trace_of(config, scheduler_config, groups, files.eos_token_ids),
        compilations=compilations,
    )


def _handshake(opened: OpenModel, config: EngineConfig, vocab_size: int) -> Handshake:
    files, found = opened.files, opened.tokenizer
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
    if found is None:
        return Handshake(model=model, tokenizer=None, tokenizer_json=b"", heartbeat_s=HEARTBEAT_S)
    tokenizer = TokenizerInfo(
        fingerprint=fingerprint_of(found.tokenizer_json),
        tokenizer_json=None,
        chat_template=found.chat_template,
        special_tokens=found.special_tokens,
    )
    return Handshake(
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
