"""Processes that are ranks, kept for several tests: each runs functions of test modules, with its
`Collectives`. One thread each."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from engine_core.distributed.collectives import Collectives, SingleRank, TorchCollectives
from engine_core.distributed.parallel import Parallel

_WAIT_S = 300.0
"""Far above what a loaded machine needs: a failure, not a measure."""

RankFunction = Callable[..., Any]
"""(collectives, *arguments) -> an answer that can be pickled; of a module, by name."""


class RankProcesses:
    """`number` processes. A context manager: none is left."""

    def __init__(self, number: int, *, timeout_s: float = _WAIT_S) -> None:
        spawned = multiprocessing.get_context("forkserver")
        spawned.set_forkserver_preload(["torch", "engine_core.startup.model"])
        self._store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_WAIT_S),
        )
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(number):
            mine, theirs = spawned.Pipe()
            process = spawned.Process(
                target=_serve, args=(theirs, self._store.port, rank, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *failure: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.terminate()
            process.join()

    def run(
        self, function: RankFunction, *arguments: Any, tp_size: int = 1, pp_size: int = 1
    ) -> list[Any]:
        """The answers of `tp_size * pp_size` ranks; an exception if any raised one."""
        self.start(function, *arguments, tp_size=tp_size, pp_size=pp_size)
        pipes = self._pipes[: tp_size * pp_size]
        answers: dict[int, Any] = {}
        while len(answers) < len(pipes):
            ready = wait([p for rank, p in enumerate(pipes) if rank not in answers], _WAIT_S)
            for rank in [pipes.index(pipe) for pipe in ready]:
                is_error, answers[rank] = self.answer(rank)
                # others may wait for a rank that has failed
                assert not is_error, f"rank {rank} of {len(pipes)}:\n{answers[rank]}"
            assert ready, "no rank answers"
        return [answers[rank] for rank in range(len(pipes))]

    def start(
        self, function: RankFunction, *arguments: Any, tp_size: int = 1, pp_size: int = 1
    ) -> None:
        """Begin what `run` does."""
        for pipe in self._pipes[: tp_size * pp_size]:
            # not `send`, which would share tensors' memory through a thread
            pipe.send_bytes(pickle.dumps((function, arguments, tp_size, pp_size)))

    def answer(self, rank: int) -> tuple[bool, Any]:
        """(whether it is an error, the answer or the error's text)."""
        assert self._pipes[rank].poll(_WAIT_S), f"rank {rank} does not answer"
        is_error, answer = pickle.loads(self._pipes[rank].recv_bytes())
        return is_error, answer


def _serve(pipe: Connection, port: int, rank: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_WAIT_S))
    groups: dict[tuple[int, int], Collectives] = {(1, 1): SingleRank()}
    while True:
        try:
            function, arguments, tp_size, pp_size = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if (tp_size, pp_size) not in groups:
                groups[tp_size, pp_size] = TorchCollectives(
                    Parallel.of(rank, tp_size=tp_size, pp_size=pp_size),
                    store,
                    timeout_s=timeout_s,
                    world=f"{tp_size}x{pp_size}",
                )
            answer = False, function(groups[tp_size, pp_size], *arguments)
        except Exception:
            answer = True, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
