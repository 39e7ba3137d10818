"""A worker's process: loads its part of the model and follows rank 0's plans. `python -m` this with
an address and the process of rank 0; or `engine-core --join`."""

import dataclasses
import faulthandler
import logging
import signal
import sys

from engine_core.errors import ConfigurationError, ExitCode, StartupError
from engine_core.lifecycle import Lifecycle
from engine_core.options.checks import check_options
from engine_core.options.engine import EngineOptions
from engine_core.process.owner import Owner
from engine_core.process.supervisor import end_with
from engine_core.startup.before_torch import (
    check_kernels_package,
    load_torch_library_beside,
    no_garbage_collection,
    open_model,
    share_the_cores,
)
from engine_core.workers.channel import Channel
from engine_core.workers.codec import decode_options
from engine_core.workers.messages import Failed, Serve, Sizes, Start, WorkerAnswer
from protocol.errors import InvalidParameter
from protocol.keys import read_client_key
from protocol.logs import log_to_stderr

logger = logging.getLogger(__name__)


def join(options: EngineOptions, owner: Owner) -> int:
    """Work for the engine at `--join` until it ends. Returns DRAINED then, FAULT if it is lost.
    Raises StartupError: it does not take this worker, or the model cannot be loaded."""
    check_options(options)
    address = options.parallel.join
    assert address is not None
    owner.end_with_it(Lifecycle(drain_timeout_s=0.0))
    try:
        path = options.security.keys
        key = None if path is None else read_client_key(path, address)
    except InvalidParameter as error:
        raise ConfigurationError(f"--keys: {error}") from None
    logger.info("joining %s", address)
    return _work(Channel(address, key), options)


def main() -> int:
    """Entry point of a worker that rank 0 has started on its machine."""
    address, rank_0 = sys.argv[1:]
    end_with(int(rank_0))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 drains, and says when it is over
    try:
        return _work(Channel(address, None), None)
    except StartupError:
        return ExitCode.START_FAILED  # rank 0 has been told


def _work(channel: Channel, mine: EngineOptions | None) -> int:
    """`mine`: of a machine of its own; None: the engine's options hold here too."""
    faulthandler.enable()
    share_the_cores()
    start = channel.receive()
    if not isinstance(start, Start):
        channel.close()
        return ExitCode.DRAINED
    options = decode_options(start.options)
    if mine is None:
        # rank 0 says what it has of its own; warnings and errors name this rank
        level = "debug" if options.log_level == "debug" else "warning"
        log_to_stderr(level, options.log_format)
    else:
        options = dataclasses.replace(
            options, model=mine.model, tokenizer=mine.tokenizer, num_threads=mine.num_threads
        )
    _name_rank(start.rank)
    try:
        has_followed = _follow(channel, options, start)
    except Exception as error:
        is_known = isinstance(error, (StartupError, MemoryError, *_errors_of_models()))
        if not is_known:
            logger.exception("the worker failed")
        channel.send(
            Failed(
                why=str(error) if is_known else f"{type(error).__name__}: {error}",
                is_wrong_option=isinstance(error, ConfigurationError),
            )
        )
        channel.close()
        raise error if isinstance(error, StartupError) else StartupError(str(error)) from error
    channel.close()
    return ExitCode.DRAINED if has_followed else ExitCode.FAULT


def _follow(channel: Channel, options: EngineOptions, start: Start) -> bool:
    """Raises StartupError, among others."""
    with no_garbage_collection():
        load_torch_library_beside()
        check_kernels_package()
        opened = open_model(options)
        if opened.files.fingerprint != start.fingerprint:
            raise StartupError(
                f"the files of {options.model} are not those of the engine; give it the same"
            )
        from engine_core.executor import InProcessExecutor
        from engine_core.startup.draft_model import load_with_draft
        from engine_core.startup.model_host import LocalModelHost
        from engine_core.startup.ranks import connected, placed, room_of, with_sizes
        from engine_core.startup.resolve import plan_runner, resolve_config
        from engine_core.workers.following import follow
    import torch

    options, device = placed(options, start)
    collectives = connected(options, device, start)
    loaded = load_with_draft(options, opened.files, device, collectives)
    if loaded.is_packed:
        torch.set_num_threads(1)
    channel.send(WorkerAnswer())
    sizes = channel.receive()
    if not isinstance(sizes, Sizes):
        return True
    if sizes.dtype != loaded.numbers.name:
        raise ConfigurationError(
            f"this worker computes in {loaded.numbers.name} ({loaded.numbers.reason}), rank 0 in "
            f"{sizes.dtype}; start the engine with --dtype {sizes.dtype} or {loaded.numbers.name}"
        )
    spec = plan_runner(with_sizes(options, sizes), opened.files, loaded)
    config = resolve_config(spec, opened.files, address="")
    channel.send(WorkerAnswer(serve=room_of(config)))
    serve = channel.receive()
    if not isinstance(serve, Serve):
        return True
    config = dataclasses.replace(
        config,
        num_blocks=serve.num_blocks,
        num_host_blocks=serve.num_host_blocks,
        scheduler=dataclasses.replace(config.scheduler, max_model_len=serve.max_model_len),
    )
    runner = spec.build(
        num_blocks=serve.num_blocks,
        num_host_blocks=serve.num_host_blocks,
        max_model_len=serve.max_model_len,
    )
    spec.warm_up(runner)
    executor = InProcessExecutor(runner)
    host = LocalModelHost(spec, config, opened.files, executor, runner, None)
    del opened, loaded, spec, runner  # the model is the host's, to be given back
    channel.send(WorkerAnswer())
    return follow(channel, executor, host, collectives.parallel)


def _errors_of_models() -> tuple[type[Exception], ...]:
    import torch

    from engine_core.model_files import ModelFilesError
    from engine_core.models.errors import ModelError

    return ModelFilesError, ModelError, torch.OutOfMemoryError


def _name_rank(rank: int) -> None:
    make = logging.getLogRecordFactory()

    def named(*args: object, **more: object) -> logging.LogRecord:
        record = make(*args, **more)
        record.name = f"rank {rank} {record.name}"
        return record

    logging.setLogRecordFactory(named)


if __name__ == "__main__":
    sys.exit(main())
