"""Rank 0's side: starts workers, takes those that join, talks to them, notices their end."""

import contextlib
import logging
import os
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self, TypeVar

import zmq

from engine_core.errors import WorkerLost
from engine_core.kv_cache.block_counts import least_sizes
from engine_core.model_runner.sampled_tokens import SampledTokens
from engine_core.options.engine import EngineOptions
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from engine_core.server.keys import KeyFolder
from engine_core.server.limited_log import LimitedLog
from engine_core.server.unix_socket import private_umask
from engine_core.workers.codec import decode_output, encode_options, encode_plan, encode_sampled
from engine_core.workers.meeting import (
    PLAN,
    code_version,
    host_to_join,
    how_it_ended,
    machine_id,
    make_folder,
)
from engine_core.workers.messages import (
    Change,
    FromRank0,
    Joins,
    Probe,
    Serve,
    Sizes,
    Start,
    StepOutput,
    Stop,
    WorkerAnswer,
    encode,
    to_rank_0,
)
from engine_core.workers.sockets import WorkerSockets
from engine_core.workers.worker import Worker
from protocol.codec import understood
from protocol.errors import MalformedMessage
from protocol.programs import python_module

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_S = 0.2
_STOP_S = 5.0
_PROBE_S = 10.0
_SHOWN_S = 1.0
_LAST_WORDS_S = 0.2
"""Seconds in which what a process said before its end arrives."""


class WorkerGroup:
    """Workers of one engine, by rank from 1 on; all methods are the loop's thread's.

    Args:
        keys: of those that may join from other machines.

    Raises:
        ConfigurationError: --workers-bind cannot be bound, or is open to others and has no keys.
    """

    def __init__(self, options: EngineOptions, keys: KeyFolder | None) -> None:
        self._options = options
        self._parallel = options.parallel
        self.address: str | None = None
        """The address at which workers of other machines join."""
        self._num_local = self._parallel.num_workers - 1 - self._parallel.num_joining
        self._keys = keys
        self._workers: list[Worker] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: deque[StepOutput] = deque()
        self._log = LimitedLog(logger, logging.WARNING, time.monotonic)
        self._failure = ""
        """Why the group cannot go on."""
        self._is_wrong_option = False
        self._is_serving = False
        self._resources = contextlib.ExitStack()
        self._sockets = WorkerSockets()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ start

    def _begin(self) -> None:
        self._folder = make_folder()
        self._resources.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._resources.callback(self._sockets.close)
        self._rendezvous = f"file://{self._folder}/ranks"
        if self._parallel.workers_bind is not None:
            self._bind_for_others(self._parallel.workers_bind)
        address = f"ipc://{self._folder}/plans"
        with private_umask():
            self._sockets.bind(address)
        # not in the terminal's group: Ctrl-C is for rank 0, which drains
        command = [*python_module("engine_core.startup.worker"), address, str(os.getpid())]
        for _ in range(self._num_local):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
            self._processes.append(process)

    def _bind_for_others(self, address: str) -> None:
        """Raises ConfigurationError."""
        host = host_to_join(address, has_keys=self._keys is not None)
        self.address = self._sockets.bind(address, self._keys)
        self._rendezvous = f"tcp://{host}"
        logger.info(
            "%d of %d workers are to join: engine-core --join %s --model ...%s",
            self._parallel.num_joining,
            self._parallel.num_workers,
            self.address,
            "" if self._keys is None else " --keys FILE",
        )

    def assemble(self, device: str, fingerprint: str) -> Start:
        """Wait until all are there, and let them load the model. Returns what rank 0 is told.
        Raises WorkerLost."""
        said_s = time.monotonic()
        while len(self._workers) < self._parallel.num_workers - 1:
            self.poll(_TICK_S)
            self.check()
            if time.monotonic() - said_s > 30 and self._parallel.num_joining:
                said_s = time.monotonic()
                missing = self._parallel.num_workers - 1 - len(self._workers)
                logger.info("waiting for %d more workers", missing)
        hosts = [machine_id(), *(worker.host for worker in self._workers)]
        if self._rendezvous.startswith("tcp://"):
            from engine_core.distributed.rendezvous import free_port

            host = self._rendezvous.removeprefix("tcp://")
            self._rendezvous += f":{free_port(host)}"
        starts = [
            Start(
                rank=rank,
                num_workers_here=hosts.count(host),
                local_rank=hosts[:rank].count(host),
                options=encode_options(self._options),
                device=device,
                fingerprint=fingerprint,
                rendezvous=self._rendezvous,
            )
            for rank, host in enumerate(hosts)
        ]
        for worker, start in zip(self._workers, starts[1:], strict=True):
            self._send(worker, start)
        return starts[0]

    def while_all_live(self, wait: Callable[[], T]) -> T:
        """What `wait` gives, on a thread: it may wait long for a worker that has ended.
        Raises WorkerLost."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(wait())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not done.done():
            self.poll(_TICK_S / 10)
            self.check()
        return done.result()

    def loaded(self) -> None:
        """Returns when all have their part of the model. Raises WorkerLost."""
        self._answers()

    def measure(self, sizes: Sizes) -> None:
        """Let all say what they have room for; `agree_on` gets it. Raises WorkerLost."""
        self._send_all(sizes)

    def agree_on(self, serve: Serve) -> Serve:
        """The least of all ranks; they build their runners. Raises WorkerLost."""
        offers = [serve, *(answer.serve for answer in self._answers() if answer.serve is not None)]
        least = Serve(
            num_blocks=least_sizes(offer.num_blocks for offer in offers),
            num_host_blocks=least_sizes(offer.num_host_blocks for offer in offers),
            max_model_len=min(offer.max_model_len for offer in offers),
        )
        self._send_all(least)
        return least

    def serving(self) -> None:
        """Returns when all follow plans. Raises WorkerLost."""
        self._answers()
        self._is_serving = True
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ while it serves

    @property
    def wakes(self) -> "list[zmq.Socket[bytes]]":
        """Readable when a worker is lost, or says that it has failed."""
        return self._sockets.wakes

    @property
    def described(self) -> list[dict[str, int | str]]:
        """Rank, process and machine of each worker."""
        return [
            {"rank": worker.rank, "pid": worker.pid, "machine": worker.host}
            for worker in self._workers
        ]

    def send_plan(self, plan: SchedulerOutput, sampled: Sequence[SampledTokens] = ()) -> None:
        """`sampled`: of steps that stages have not heard of. Raises WorkerLost."""
        frames = PLAN, encode_plan(plan), encode_sampled(sampled)
        for worker in self._workers:
            self._send_frames(worker, *frames)

    def output_of(self, step_id: int) -> ModelRunnerOutput:
        """What the last stage says of a step that had tokens. Raises WorkerLost."""
        while not self._outputs:
            self.check()
            self.poll(_TICK_S)
        brought = self._outputs.popleft()
        assert brought.step_id == step_id
        return decode_output(brought.output)

    def change(self, what: Change) -> None:
        """`answers_to_change` has what came of it. Raises WorkerLost."""
        self._send_all(what)

    def answers_to_change(self) -> list[WorkerAnswer]:
        """The answers by rank. Raises WorkerLost."""
        return self._answers()

    def check(self) -> None:
        """Raises WorkerLost: one has ended, or a step of it has failed."""
        self._check_alive()
        for worker in self._workers:
            if worker.failed_because:
                raise WorkerLost(f"{worker}: {worker.failed_because}")

    def check_all_failed_in(self, step_id: int | None) -> None:
        """After a fault. Every worker failed in this step, as rank 0 did; then all are as they were
        before it, and go on. Raises WorkerLost: or not."""
        self._send_all(Probe())
        answers = self._answers(_PROBE_S)
        for worker, answer in zip(self._workers, answers, strict=True):
            why, worker.failed_because = worker.failed_because, ""
            if answer.failed_step is None or answer.failed_step != step_id:
                which = why or "it computed a step that failed at another rank"
                raise WorkerLost(f"{worker}: {which}")

    def check_after_fault(self) -> None:
        """Raises WorkerLost if one has ended or failed, which shows a moment after its peers have
        failed."""
        until_s = time.monotonic() + _SHOWN_S
        while time.monotonic() < until_s:
            self.check()
            self.poll(_TICK_S)

    def _check_alive(self) -> None:
        self.poll()
        if self._failure:
            raise WorkerLost(self._failure, is_wrong_option=self._is_wrong_option)

    def close(self) -> None:
        """The workers end; what does not is killed."""
        if self._is_serving:
            for worker in self._workers:
                with contextlib.suppress(WorkerLost):
                    self._send(worker, Stop())
        limit_s = time.monotonic() + (_STOP_S if self._is_serving else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, limit_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ messages

    def _send_all(self, message: FromRank0) -> None:
        for worker in self._workers:
            self._send(worker, message)

    def _send(self, worker: Worker, message: FromRank0) -> None:
        self._send_frames(worker, encode(message))

    def _send_frames(self, worker: Worker, *frames: bytes) -> None:
        try:
            worker.socket.send_multipart([worker.identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            is_gone = error.errno == zmq.EHOSTUNREACH
            self._fail(
                worker, worker.how_it_ended(_STOP_S) if is_gone else f"takes no message: {error}"
            )
            raise WorkerLost(self._failure) from None

    def _answers(self, limit_s: float = float("inf")) -> list[WorkerAnswer]:
        until_s = time.monotonic() + limit_s
        while not all(worker.answers for worker in self._workers):
            self.poll(_TICK_S)
            self._check_alive()
            if time.monotonic() > until_s:
                silent = next(worker for worker in self._workers if not worker.answers)
                raise WorkerLost(f"{silent} has not answered for {limit_s:g} s")
        return [worker.answers.popleft() for worker in self._workers]

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take what has come."""
        if self._sockets.wait(timeout_s):
            self._read()
        if self._sockets.is_one_lost:  # whose it was shows when something is sent
            for worker in self._workers:
                with contextlib.suppress(WorkerLost):
                    self._send_frames(worker, b"")
        for number, process in enumerate(self._processes, start=1):
            if process.poll() is not None and not self._failure:
                self._sockets.wait(_LAST_WORDS_S)
                self._read()
                if not self._failure:
                    self._failure = (
                        f"rank {number} (pid {process.pid}) {how_it_ended(process.returncode)}"
                    )

    def _read(self) -> None:
        for socket, identity, frame in self._sockets.receive():
            try:
                self._take(socket, identity, frame)
            except (MalformedMessage, zmq.ZMQError) as error:  # or it has left again
                self._log.log("foreign", f"what came at a worker's address: {error}")

    def _take(self, socket: "zmq.Socket[bytes]", identity: bytes, frame: zmq.Frame) -> None:
        message = understood(to_rank_0.decode, frame.buffer, "a worker's message")
        if isinstance(message, Joins):
            self._join(socket, identity, message, frame)
            return
        for worker in self._workers:
            if (worker.socket, worker.identity) == (socket, identity):
                if isinstance(message, WorkerAnswer):
                    worker.answers.append(message)
                elif isinstance(message, StepOutput):
                    self._outputs.append(message)
                elif message.step_id is not None:
                    worker.failed_because = message.why
                else:
                    self._is_wrong_option = message.is_wrong_option
                    self._fail(worker, f"cannot start: {message.why}")

    def _join(
        self, socket: "zmq.Socket[bytes]", identity: bytes, joins: Joins, frame: zmq.Frame
    ) -> None:
        process = next((each for each in self._processes if each.pid == joins.pid), None)
        is_local = process is not None and socket is self._sockets.last_bound
        num_joined = sum(worker.process is None for worker in self._workers)
        why = ""
        if joins.version != code_version():
            why = f"it runs engine-core {joins.version}, the engine {code_version()}; update one"
        elif not is_local and num_joined == self._parallel.num_joining:
            why = "the engine has all its workers; raise --num-joining there"
        elif not is_local and self._sockets.lacks_admins_key(frame):
            why = "its key is no admin's, and a worker sees every request; use an admin's key"
        if why:
            self._log.log("refused", f"a worker (pid {joins.pid}) is not taken: {why}")
            socket.send_multipart([identity, encode(Stop(why=why))])
            return
        rank = 1 + self._num_local + num_joined
        if is_local:
            assert process is not None
            rank = 1 + self._processes.index(process)
        worker = Worker(
            rank, socket, identity, joins.pid, joins.host, process if is_local else None
        )
        self._workers.append(worker)
        self._workers.sort(key=lambda each: each.rank)
        logger.info("%s is there", worker)

    def _fail(self, worker: Worker, why: str) -> None:
        if not self._failure:
            before = f", as its step failed: {worker.failed_because}"
            self._failure = f"{worker} {why}{before if worker.failed_because else ''}"
