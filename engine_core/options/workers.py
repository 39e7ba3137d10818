"""Options for several workers: one model over several devices and machines, several engines."""

import dataclasses
from typing import Annotated

from cyclopts import Group, Parameter

from engine_core.options.values import COMMON, NOT_NEGATIVE, POSITIVE

_PARALLEL = Parameter(group=Group.create_ordered("Several workers"))


@Parameter(name="*", group=_PARALLEL.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelOptions:
    tensor_parallel_size: Annotated[int, COMMON, POSITIVE, Parameter(alias="-tp")] = 1
    """Workers that share each layer, a device each; on a CPU a share of its cores each."""
    pipeline_parallel_size: Annotated[int, POSITIVE, Parameter(alias="-pp")] = 1
    """Stages that share the layers, each of --tensor-parallel-size workers."""
    data_parallel_size: Annotated[int, POSITIVE, Parameter(alias="-dp")] = 1
    """Whole engines of this machine that serve the model, each of them a command of its own with a
    rank; `engine-client serve` and LLM start them all."""
    data_parallel_rank: Annotated[int | None, NOT_NEGATIVE] = None
    """Which of --data-parallel-size this one is, from 0: it takes its share of the machine's cores
    and memory, or its own GPUs."""
    workers_bind: str | None = None
    """tcp://HOST:PORT at which workers of other machines join; needs --num-joining."""
    num_joining: Annotated[int, NOT_NEGATIVE] = 0
    """How many of the workers come from other machines, by `engine-core --join`."""
    join: str | None = None
    """Be a worker of the engine whose --workers-bind this is; of the other options only --model,
    --tokenizer, --keys, --num-threads, --supervise and those of the log have a meaning."""

    @property
    def num_workers(self) -> int:
        """Workers of one engine, rank 0 included, which is the daemon itself."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
