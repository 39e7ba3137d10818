"""The process: start up, main loop, shut down; what stdout says, and the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.errors import ExitCode, StartupError
from engine_core.installation import files_are_gone
from engine_core.kv_cache import sizes_of
from engine_core.lifecycle import Lifecycle, deferred_interrupt
from engine_core.observers.watchdog import Watchdog
from engine_core.options.checks import check_options
from engine_core.options.engine import EngineOptions
from engine_core.process.owner import Owner
from engine_core.process.service_manager import READY, STOPPING, ServiceManager
from engine_core.process.suspects import Suspects
from engine_core.server.descriptors import limit_clients
from engine_core.server.keys import KeyFolder
from engine_core.server.transport import ZmqTransport, is_tcp, most_message_bytes
from engine_core.startup.before_torch import (
    check_kernels_package,
    load_torch_library_beside,
    no_garbage_collection,
    open_model,
    share_the_cores,
    touch_weight_memory,
)
from engine_core.startup.phases import StartPhases
from protocol.addresses import default_address
from protocol.outputs import FinishReason
from protocol.running_daemons import RunningDaemon, listed, note_daemon

if TYPE_CHECKING:
    from engine_core.core import EngineCore
    from engine_core.startup.config import EngineConfig

logger = logging.getLogger(__name__)

WorkerList = list[dict[str, int | str]]


def run_daemon(
    options: EngineOptions,
    owner: Owner,
    service_manager: ServiceManager,
    suspects: Suspects | None = None,
) -> int:
    """Serve until asked to stop.
    Returns the exit code: DRAINED or FAULT. Raises StartupError: the daemon could not start.

    Args:
        owner: serve no longer than it lives.
        suspects: under a supervisor, the requests that may have killed the engine before.
    """
    phases = StartPhases()
    check_options(options)
    faulthandler.enable()
    share_the_cores()
    options = dataclasses.replace(options, max_clients=limit_clients(options.max_clients))
    lifecycle = Lifecycle(
        drain_timeout_s=options.drain_timeout,
        on_stop=lambda why: service_manager.notify(STOPPING, f"STATUS=stopping: {why}"),
    )
    owner.end_with_it(lifecycle)
    # The address first: if it is taken, say so before the model has been loaded.
    security = options.security
    keys = None if security.keys is None else KeyFolder(security.keys)
    # on a Unix socket there are none; then those that are given are for workers that join
    is_for_workers = options.parallel.workers_bind is not None and not is_tcp(options.bind)
    with contextlib.ExitStack() as resources:
        with deferred_interrupt():
            transport = resources.enter_context(
                ZmqTransport(
                    options.bind,
                    keys=None if is_for_workers else keys,
                    is_insecure=security.insecure,
                    max_message_bytes=max(
                        most_message_bytes(options.max_model_len, options.prompt_embeds_bytes),
                        options.multimodal.most_frame_bytes(options.model),
                    ),
                )
            )
            resources.enter_context(listed(_listing(options, transport)))
        core, config, workers = _start(
            options, transport, lifecycle, phases, resources, keys, suspects
        )
        with lifecycle.listen(transport):
            phases.enter("serving")
            note_daemon(os.getpid(), is_ready=True)
            _announce(config, phases, workers)
            service_manager.notify(READY, f"STATUS=serving {config.model} at {config.address}")
            progress = core.progress
            with _watched(core, options), service_manager.pings(lambda: progress.num_steps):
                return _serve(core, is_supervised=options.supervise)


def _start(
    options: EngineOptions,
    transport: ZmqTransport,
    lifecycle: Lifecycle,
    phases: StartPhases,
    resources: contextlib.ExitStack,
    keys: KeyFolder | None,
    suspects: Suspects | None,
) -> tuple[EngineCore, EngineConfig, WorkerList]:
    group = None
    try:
        with no_garbage_collection():
            loader = load_torch_library_beside()
            check_kernels_package()
            options.scheduling.check()
            phases.enter("files")
            opened = open_model(options)
            touch_weight_memory(options, opened.files, loader)
            note_daemon(
                os.getpid(),
                model=options.model_name or opened.files.name,
                files=str(opened.files.path.resolve()),
            )
            if options.parallel.num_workers > 1:
                from engine_core.workers.group import WorkerGroup

                with deferred_interrupt():
                    group = resources.enter_context(WorkerGroup(options, keys))
            phases.enter("imports")
            from engine_core.startup.build import build_engine  # torch

    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("kernels"):
            raise StartupError(files_are_gone(str(error.name))) from error
        if isinstance(error, OSError) and error.filename:
            from engine_core.model_files import unreadable

            raise StartupError(unreadable(error)) from error
        if not _is_want_of_memory(error):
            raise
        raise StartupError(
            f"there is not enough memory to load libraries ({error}); raise the limit of this "
            "process (`ulimit -v`) or of its container, or free some"
        ) from error
    core, config = build_engine(options, opened, transport, lifecycle, phases, group, suspects)
    if group is None:
        return core, config, []
    for socket in group.wakes:
        transport.watch(socket)
    return core, config, group.described


def _listing(options: EngineOptions, transport: ZmqTransport) -> RunningDaemon:
    asked = options.model or ""
    return RunningDaemon(
        pid=os.getpid(),
        model=options.model_name or asked,
        address=transport.address,
        files="",
        asked=str(Path(asked).absolute()) if asked and Path(asked).exists() else asked,
        is_ready=False,
    )


def _is_want_of_memory(error: Exception) -> bool:
    """Loaders have words only."""
    words = ("failed to map segment", "annot allocate memory", "can't start new thread")
    return isinstance(error, MemoryError) or any(text in str(error) for text in words)


def _watched(core: EngineCore, options: EngineOptions) -> contextlib.AbstractContextManager[object]:
    if not options.watchdog_timeout:
        return contextlib.nullcontext()
    return Watchdog(
        core.progress,
        timeout_s=options.watchdog_timeout,
        numbers=lambda: str(core.statistics()),
        ends_process=options.supervise,
    )


def _serve(core: EngineCore, *, is_supervised: bool) -> int:
    """A supervised engine that fails ends no request: clients send them to the next one, as after
    a kill."""
    try:
        core.run()
    except Exception as error:
        logger.exception("the engine failed")
        if not is_supervised:
            core.end_all(FinishReason.ERROR, f"the engine failed: {type(error).__name__}: {error}")
        return ExitCode.FAULT
    finally:
        core.close()
    logger.info("stopped")
    return ExitCode.DRAINED


def _announce(config: EngineConfig, phases: StartPhases, workers: WorkerList) -> None:
    """One line of JSON on stdout, or a text for a person. A parent that has exited is no reason to
    fail."""
    document = {
        "event": "ready",
        "address": config.address,
        "model": config.model,
        "max_model_len": config.scheduler.max_model_len,
        "num_blocks": sum(sizes_of(config.num_blocks)),
        "block_size": config.block_size,
        "dtype": config.dtype,
        "dtype_reason": config.dtype_reason,
        "instruction_set": config.instruction_set,
        "num_threads": config.num_threads,
        "num_threads_reason": config.num_threads_reason,
        "weights": config.weights,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_cache_bytes": config.kv_cache_bytes,
        "device": config.device,
        "device_reason": config.device_reason,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.scheduler.pipeline_parallel_size,
        "workers": workers,
        "ready_s": round(phases.total_s, 3),
        "phases_s": {phase: round(spent_s, 3) for phase, spent_s in phases.spent_s().items()},
    }
    text = _for_a_person(config, phases) if sys.stdout.isatty() else json.dumps(document)
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        logger.warning("the ready line cannot be written to standard output: %s", error.strerror)


def _for_a_person(config: EngineConfig, phases: StartPhases) -> str:
    address = "" if config.address == default_address() else f" --address {config.address}"
    on_cpu = config.device_reason and f"On the CPU, not the GPU: {config.device_reason}.\n"
    return (
        f"\nServing {config.model} at {config.address}\n"
        f"({config.weights} weights, up to {config.scheduler.max_model_len:,} tokens a request, "
        f"ready after {phases.total_s:.1f} s).\n{on_cpu}\n"
        "In another terminal:\n"
        f"  engine-client{address} chat\n"
        f'  engine-client{address} complete "Once upon a time"\n'
        f"  engine-client{address} info\n\n"
        "Ctrl-C stops the daemon.\n"
    )
