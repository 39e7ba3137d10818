"""What ranks exchange: sums and shards within a stage, hidden states from stage to stage."""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _SymmetricMemory

from engine_core.distributed.parallel import Parallel

_Group = Any
"""dist.ProcessGroupGloo or ProcessGroupNCCL; torch's stubs leave out half of their methods."""

_TWO_PHASE_BYTES = 256 << 10
"""From here on bytes cost more than one more message; less, the other way round."""
_NUM_THREADS = 1
"""Of gloo, for each group: a rank has one operation under way at a time."""


class CollectiveError(Exception):
    """A rank did not answer in time or is gone; the text says which one noticed, and what."""


@dataclasses.dataclass(slots=True)
class CollectiveCount:
    """Of this rank, since it started. On a GPU seconds are those of launches."""

    num_bytes: int = 0
    """Sent."""
    seconds: float = 0.0
    """The wait for slower ranks included."""


class Collectives(Protocol):
    """Every rank of a group calls the same operations in the same order, with equal shapes and
    dtypes; each call returns when this rank's part is done (on a GPU: is queued).
    All raise CollectiveError."""

    @property
    def parallel(self) -> Parallel: ...

    @property
    def counts(self) -> Mapping[str, CollectiveCount]:
        """Counts of collectives by what they were for."""

    def all_reduce_(self, x: torch.Tensor, part: str = "vocabulary") -> torch.Tensor:
        """In place, the sum over the stage's ranks -> x. Contiguous. Terms are added by rising
        rank, in float32 for narrower dtypes, so an element's bits depend on the terms alone: not on
        the shape, nor on the place in x. `part`: of the model, which it is counted for."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[T, *x.shape], by rank of the stage."""

    def send(self, x: torch.Tensor, stage: int) -> None:
        """To the rank with this tp_rank in another stage; returns when x may be changed."""

    def recv(self, into: torch.Tensor, stage: int) -> torch.Tensor:
        """Receive what `send` of such a rank gave -> into. Contiguous."""

    def close(self) -> None:
        """No call follows; those of other ranks that wait for this one fail."""


class OneShot(Protocol):
    """Sums over a stage's ranks through memory that all of them reach."""

    @property
    def most_bytes(self) -> int: ...

    def __call__(self, x_N: torch.Tensor) -> None:
        """In place, the sum over the ranks of up to `most_bytes`, added by rising rank -> x_N."""


class SingleRank:
    """`Collectives` of a rank alone."""

    parallel = Parallel()
    counts: Mapping[str, CollectiveCount] = {}

    def all_reduce_(self, x: torch.Tensor, part: str = "vocabulary") -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def send(self, x: torch.Tensor, stage: int) -> None:
        raise AssertionError("there is one stage")

    def recv(self, into: torch.Tensor, stage: int) -> torch.Tensor:
        raise AssertionError("there is one stage")

    def close(self) -> None:
        pass


SINGLE_RANK = SingleRank()

Backend = Literal["gloo", "nccl"]


class TorchCollectives:
    """`Collectives` over torch.distributed. Connects on first use of a group, so `barrier` (which
    uses all) comes first.

    Args:
        store: where the ranks find each other: a `torch.distributed.TCPStore`.
        host: address of this machine that the other ranks reach; gloo binds there.
        timeout_s: longest wait for another rank in one operation. A dead rank's closed connection
            is noticed at once.
        backend: "gloo" on CPUs, "nccl" on GPUs (the current device).
        world: a name that `store` has not seen before: no two groups share it.

    Raises:
        CollectiveError: this build of torch lacks the backend.
    """

    def __init__(
        self,
        parallel: Parallel,
        store: Store,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 300.0,
        backend: Backend = "gloo",
        world: str = "world",
    ) -> None:
        is_there = dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()
        if not is_there:
            raise CollectiveError(f"this build of torch {torch.__version__} has no {backend}")
        self.parallel = parallel
        self.counts: dict[str, CollectiveCount] = {}
        self._timeout = timedelta(seconds=timeout_s)
        self._host = host
        self._backend = backend
        self._groups: list[_Group] = []
        self._stage_store = PrefixStore(f"{world}/tp{parallel.pp_rank}", store)
        self._one_shot: OneShot | None = None
        self._shared: Any = None
        with self._failures():
            self._stage = self._group(
                self._stage_store,
                parallel.tp_rank,
                parallel.tp_size,
            )
            self._column = self._group(
                PrefixStore(f"{world}/pp{parallel.tp_rank}", store),
                parallel.pp_rank,
                parallel.pp_size,
            )

    def _group(self, store: Store, rank: int, size: int) -> _Group | None:
        if size == 1:
            return None
        if self._backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            options._threads = _NUM_THREADS
            options._timeout = self._timeout
            group: _Group = dist.ProcessGroupGloo(store, rank, size, options)
        else:
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = self._timeout
            group = dist.ProcessGroupNCCL(store, rank, size, settings)
        self._groups.append(group)
        return group

    def barrier(self) -> None:
        """Returns when every rank of the stage, and of the stages behind this tp_rank, is there."""
        with self._failures():
            for group in self._groups:
                group.barrier().wait()

    def all_reach_each_other(self) -> bool:
        """Whether the stage's GPUs read each other's memory: on one machine, every pair of them.
        All ranks call it, and have the same answer."""
        mine = torch.cuda.current_device()
        host = int.from_bytes(hashlib.sha256(os.uname().nodename.encode()).digest()[:7])
        places = self.all_gather(torch.tensor([host, mine], device="cuda")).tolist()
        reached = [
            other_host == host and (other == mine or torch.cuda.can_device_access_peer(mine, other))
            for other_host, other in places
        ]
        answers = self.all_gather(torch.tensor([all(reached)], device="cuda"))
        return bool(answers.all())

    def share_memory(self, num_bytes: int) -> list[int]:
        """Zeroed memory of so many bytes for each rank of the stage, that all of them reach over
        NVLink. Its addresses in this process, by rank. Once, after `barrier`; all ranks call it."""
        rank, size = self.parallel.tp_rank, self.parallel.tp_size
        name = f"stage{self.parallel.pp_rank}"
        with self._failures():
            _SymmetricMemory.set_group_info(
                name, rank, size, PrefixStore("memory", self._stage_store)
            )
            device = torch.device("cuda", torch.cuda.current_device())
            mine = _SymmetricMemory.empty_strided_p2p(
                (num_bytes,), (1,), torch.uint8, device, name
            ).zero_()
            self._shared = mine, (handle := _SymmetricMemory.rendezvous(mine, name))
            torch.cuda.synchronize()  # zero before another rank writes
        self.barrier()
        return [int(address) for address in handle.buffer_ptrs]

    def sum_in_one_shot(self, one_shot: OneShot) -> None:
        """Let sums of up to its `most_bytes` go its way from now on; all ranks call this."""
        self._one_shot = one_shot

    def all_reduce_(self, x: torch.Tensor, part: str = "vocabulary") -> torch.Tensor:
        size = self.parallel.tp_size
        if self._stage is None:
            return x
        flat = x.view(-1)
        if self._one_shot is not None and x.nbytes <= self._one_shot.most_bytes:
            with self._failures(part, x.nbytes * (size - 1)):
                self._one_shot(flat)
            return x
        if size > 2 and x.nbytes >= _TWO_PHASE_BYTES and not x.numel() % size:
            # each rank sums a part: the same sums, and 2 (T - 1) / T instead of T - 1 times x
            terms = torch.empty_like(flat).view(size, -1)
            with self._failures(part, x.nbytes - x.nbytes // size):
                if self._backend == "nccl":
                    self._stage.alltoall_base(terms.view(-1), flat, [], []).wait()
                else:
                    self._exchange(flat.view(size, -1), terms)
            mine = _sum_by_rank(terms, flat.new_empty(len(flat) // size))
            flat.copy_(self._gathered(mine, part).view(-1))
            return x
        _sum_by_rank(self._gathered(flat, part), flat)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._gathered(x, "vocabulary")

    def _gathered(self, x: torch.Tensor, part: str) -> torch.Tensor:
        size = self.parallel.tp_size
        gathered = x.new_empty(size, *x.shape)
        if self._stage is None:
            return gathered.copy_(x[None])
        x = x.contiguous()
        with self._failures(part, x.nbytes * (size - 1)):
            if self._backend == "nccl":
                self._stage._allgather_base(gathered.view(-1), x.view(-1)).wait()
            else:
                self._exchange([x] * size, gathered)
        return gathered

    def _exchange(self, given: Sequence[torch.Tensor] | torch.Tensor, into: torch.Tensor) -> None:
        """`given[r]` to rank r of the stage, and what it gave this one into `into[r]`. By gloo's
        messages: its collectives are done by threads, and take four times as long."""
        group, mine = self._stage, self.parallel.tp_rank
        assert group is not None
        others = [rank for rank in range(self.parallel.tp_size) if rank != mine]
        messages = [group.recv([into[rank]], rank, 0) for rank in others]
        messages += [group.send([given[rank]], rank, 0) for rank in others]
        into[mine].copy_(given[mine])
        for message in messages:
            message.wait()

    def send(self, x: torch.Tensor, stage: int) -> None:
        assert self._column is not None, "there is one stage"
        with self._failures("stages", x.nbytes):
            self._column.send([x.contiguous()], stage, 0).wait()

    def recv(self, into: torch.Tensor, stage: int) -> torch.Tensor:
        assert self._column is not None, "there is one stage"
        with self._failures("stages", 0):
            self._column.recv([into], stage, 0).wait()
        return into

    def close(self) -> None:
        for group in self._groups:
            group.shutdown()
        self._groups = []
        self._stage = self._column = self._one_shot = self._shared = None

    @contextlib.contextmanager
    def _failures(self, part: str = "", num_bytes: int = 0) -> Iterator[None]:
        """Counts what is done for a part."""
        began_s = time.perf_counter()
        try:
            yield
            if part:
                count = self.counts.setdefault(part, CollectiveCount())
                count.num_bytes += num_bytes
                count.seconds += time.perf_counter() - began_s
        except RuntimeError as error:
            mine = self.parallel
            reason = str(error).split("\n", 1)[0]
            raise CollectiveError(
                f"rank {mine.rank} of {mine.world_size} lost another one: {reason}"
            ) from error


def _sum_by_rank(terms_TN: torch.Tensor, into_N: torch.Tensor) -> torch.Tensor:
    """-> into, which is none of the terms."""
    total_N = terms_TN[0] if into_N.dtype.itemsize >= 4 else terms_TN[0].float()
    for term_N in terms_TN[1:]:
        total_N += term_N
    return into_N.copy_(total_N)
