"""Options for several workers: those without effect, and those that contradict each other."""

import dataclasses

from engine_core.errors import ConfigurationError
from engine_core.options.engine import EngineOptions
from engine_core.options.refusals import refuse
from engine_core.options.workers import ParallelOptions


def check_parallel(options: EngineOptions) -> None:
    """Raises ConfigurationError: an option without effect, or what several workers cannot do."""
    parallel = options.parallel
    if parallel.join is not None:
        _check_join(options)
        return
    _check_data_parallel(parallel)
    if bool(parallel.num_joining) != (parallel.workers_bind is not None):
        raise ConfigurationError(
            "--workers-bind and --num-joining have no effect without each other; give both, or "
            "omit both"
        )
    if parallel.num_joining and parallel.num_joining >= parallel.num_workers:
        raise ConfigurationError(
            f"--num-joining is {parallel.num_joining}, and there are {parallel.num_workers} "
            "workers, of which one is the daemon itself; lower it, or raise "
            "--tensor-parallel-size or --pipeline-parallel-size"
        )
    if parallel.num_workers > 1:
        refuse(options, "workers")


def _check_data_parallel(parallel: ParallelOptions) -> None:
    size, rank = parallel.data_parallel_size, parallel.data_parallel_rank
    if size > 1 and rank is None:
        raise ConfigurationError(
            f"--data-parallel-size is {size}, and this command starts one engine; use "
            f"engine-client serve MODEL --data-parallel-size {size}, or start so many, each with "
            "--data-parallel-rank and a --bind of its own (docs/guides/parallel.md), or "
            "engine-core on-ray"
        )
    if rank is not None and rank >= size:
        raise ConfigurationError(
            f"--data-parallel-rank is {rank}, and --data-parallel-size {size}; ranks count from 0: "
            "lower the rank, or raise the size"
        )


_OF_A_JOINED = frozenset({
    "model", "tokenizer", "security", "parallel", "num_threads", "log_level", "log_format",
    "supervise", "max_restarts", "exit_on_stdin_eof", "parent_pid",
})  # fmt: skip


def _check_join(options: EngineOptions) -> None:
    for field in dataclasses.fields(options):
        default = field.default
        if default is dataclasses.MISSING:
            assert field.default_factory is not dataclasses.MISSING
            default = field.default_factory()
        if field.name not in _OF_A_JOINED and getattr(options, field.name) != default:
            raise ConfigurationError(
                f"--{field.name.replace('_', '-')} has no effect with --join: the engine that is "
                "joined decides it; omit it here, and give it there"
            )
    if options.parallel != ParallelOptions(join=options.parallel.join):
        raise ConfigurationError(
            "--join comes alone: the engine that is joined has the sizes; omit the other options "
            "for several workers"
        )
    if options.model is None:
        raise ConfigurationError("--join needs --model, the same files as the engine's; give both")
