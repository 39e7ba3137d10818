"""This process's place among the ranks of an engine: alone, or rank 0 with a group of workers."""

import contextlib
import dataclasses

import torch

from engine_core.control import ModelHost
from engine_core.devices import traits_of
from engine_core.distributed.collectives import (
    SINGLE_RANK,
    CollectiveError,
    Collectives,
    TorchCollectives,
)
from engine_core.distributed.parallel import Parallel
from engine_core.distributed.rendezvous import local_host, open_store
from engine_core.errors import ConfigurationError, StartupError
from engine_core.executor import InProcessExecutor
from engine_core.model_files import ModelFiles
from engine_core.models.config import ModelConfig
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.parallel.stages import split_layers
from engine_core.models.registry import read_model_config
from engine_core.options.engine import EngineOptions
from engine_core.startup.config import EngineConfig
from engine_core.startup.device import defaults_of
from engine_core.startup.resolve import resolve_config
from engine_core.startup.runner_spec import Runner, RunnerSpec
from engine_core.workers.executor import GroupExecutor, GroupModelHost, PipelineExecutor
from engine_core.workers.group import WorkerGroup
from engine_core.workers.messages import Serve, Sizes, Start
from kernels.cpu.threads import choose_threads


class OneRank:
    """An engine of one process."""

    collectives: Collectives = SINGLE_RANK

    def take_place(
        self, options: EngineOptions, device: torch.device, files: ModelFiles
    ) -> tuple[EngineOptions, torch.device]:
        """Options and device of this rank, before the model is loaded."""
        if options.parallel.data_parallel_size == 1:
            return options, device
        return share_of_machine(options, device, num_workers=1, local_rank=0)

    def loaded(self) -> None:
        """This rank has its part of the model."""

    def resolve(self, spec: RunnerSpec, files: ModelFiles, address: str) -> EngineConfig:
        """See `resolve_config`: what every rank has room for."""
        return resolve_config(spec, files, address=address)

    def serving(self) -> None:
        """This rank can follow plans."""

    def executor(self, runner: Runner) -> InProcessExecutor:
        return InProcessExecutor(runner)

    def model_host(self, host: ModelHost) -> ModelHost:
        return host


class RankZero(OneRank):
    """The methods raise WorkerLost."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._model: str | None = None

    def take_place(
        self, options: EngineOptions, device: torch.device, files: ModelFiles
    ) -> tuple[EngineOptions, torch.device]:
        self._model = options.model
        _check_stages(options, files)
        start = self._group.assemble(device.type, files.fingerprint)
        options, device = placed(options, start)
        self.collectives = self._group.while_all_live(lambda: connected(options, device, start))
        return options, device

    def loaded(self) -> None:
        self._group.loaded()

    def resolve(self, spec: RunnerSpec, files: ModelFiles, address: str) -> EngineConfig:
        self._group.measure(
            Sizes(
                max_num_seqs=spec.config.max_num_seqs,
                max_num_batched_tokens=spec.config.max_num_batched_tokens,
                dtype=spec.loaded.numbers.name,
                keeps_bytes=spec.config.kv_dtype is torch.int8,
            )
        )
        config = resolve_config(spec, files, address=address)
        least = self._group.agree_on(room_of(config))
        return dataclasses.replace(
            config,
            num_blocks=least.num_blocks,
            kv_cache_bytes=spec.config.layout.num_bytes(least.num_blocks),
            num_host_blocks=least.num_host_blocks,
            host_cache_bytes=spec.config.layout.num_bytes(least.num_host_blocks),
            scheduler=dataclasses.replace(config.scheduler, max_model_len=least.max_model_len),
        )

    def serving(self) -> None:
        self._group.serving()

    def executor(self, runner: Runner) -> InProcessExecutor:
        num_stages = self.collectives.parallel.pp_size
        executor = (
            PipelineExecutor(runner, self._group, num_stages=num_stages)
            if num_stages > 1
            else GroupExecutor(runner, self._group)
        )
        executor.collectives = self.collectives
        return executor

    def model_host(self, host: ModelHost) -> ModelHost:
        return GroupModelHost(host, self._group, self._model)


def _check_stages(options: EngineOptions, files: ModelFiles) -> None:
    """Refuse before any rank loads. Raises ModelConfigError: the model has too few layers."""
    with contextlib.suppress(UnsupportedArchitecture):  # what loads it says why
        config = read_model_config(files.config)
        if isinstance(config, ModelConfig):
            split_layers(config, options.parallel.pipeline_parallel_size)


def room_of(config: EngineConfig) -> Serve:
    """Blocks and tokens that a rank's memory allows."""
    return Serve(
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        max_model_len=config.scheduler.max_model_len,
    )


def placed(options: EngineOptions, start: Start) -> tuple[EngineOptions, torch.device]:
    """Options and device of a worker, for its share of the machine: see `share_of_machine`."""
    return share_of_machine(
        options,
        torch.device(start.device),
        num_workers=start.num_workers_here,
        local_rank=start.local_rank,
    )


def share_of_machine(
    options: EngineOptions, device: torch.device, *, num_workers: int, local_rank: int
) -> tuple[EngineOptions, torch.device]:
    """What one of this engine's `num_workers` here has of the machine, which it shares with those
    of other data parallel engines too. Raises ConfigurationError: the machine has too few devices.
    """
    parallel = options.parallel
    local_rank += num_workers * (parallel.data_parallel_rank or 0)
    num_workers *= parallel.data_parallel_size
    if not traits_of(device).is_host:
        num_devices = torch.cuda.device_count()
        if num_workers > num_devices:
            raise ConfigurationError(
                f"{num_workers} workers on a machine with {num_devices} GPUs, and each "
                "needs one; lower --tensor-parallel-size, --pipeline-parallel-size or "
                "--data-parallel-size, or let workers of other machines join"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        options = _share_of_host(options, num_workers, local_rank)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    return options, device


def connected(options: EngineOptions, device: torch.device, start: Start) -> Collectives:
    """Waits for all ranks. Raises StartupError: they do not come."""
    if not traits_of(device).is_host:
        torch.cuda.set_device(device)  # of this thread
    parallel = Parallel.of(
        start.rank,
        tp_size=options.parallel.tensor_parallel_size,
        pp_size=options.parallel.pipeline_parallel_size,
    )
    try:
        collectives = TorchCollectives(
            parallel,
            open_store(start.rendezvous, rank=start.rank, world_size=parallel.world_size),
            host=local_host(start.rendezvous),
            backend=traits_of(device).collectives,
        )
        collectives.barrier()
        if not traits_of(device).is_host and parallel.tp_size > 1:
            from kernels.triton import one_shot_sums

            most = one_shot_sums.ONE_SHOT_BYTES
            is_few = parallel.tp_size <= one_shot_sums.MAX_RANKS
            if most and is_few and collectives.all_reach_each_other():
                bases = collectives.share_memory(one_shot_sums.buffer_bytes(most))
                rank = parallel.tp_rank
                collectives.sum_in_one_shot(
                    one_shot_sums.OneShotSums(bases, rank, most_bytes=most, device=device)
                )
    except (CollectiveError, OSError, RuntimeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise StartupError(
            f"rank {start.rank} cannot reach the others ({reason}); see their logs, and let the "
            "engine's machines reach each other at every port"
        ) from error
    return collectives


def _share_of_host(options: EngineOptions, num_workers: int, local_rank: int) -> EngineOptions:
    """Workers of one machine share its cores evenly, at least one each. They are not pinned:
    beside its model a rank has threads that only wake for a moment (messages, collectives, masks),
    and the system finds them a core that is idle."""
    cores = choose_threads(options.num_threads).count
    base, more = divmod(cores, num_workers)
    fraction = options.memory_fraction or defaults_of(torch.device("cpu")).memory_fraction
    return dataclasses.replace(
        options,
        num_threads=max(1, base + (local_rank < more)),
        memory_fraction=fraction / num_workers,
    )


def with_sizes(options: EngineOptions, sizes: Sizes) -> EngineOptions:
    """A worker's options, with what rank 0 has chosen by its own part of the model."""
    scheduling = dataclasses.replace(
        options.scheduling,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
    )
    return dataclasses.replace(
        options,
        scheduling=scheduling,
        kv_cache_dtype="int8" if sizes.keeps_bytes else options.kv_cache_dtype,
    )
