"""An engine started by this client: a child process that ends with its parent."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from frontend.errors import EngineDied, EngineStartError, InvalidInput
from protocol.addresses import NO_ENGINE_ON_WINDOWS, SOCKET_NAME
from protocol.programs import python_module

T = TypeVar("T")

_NUM_SHOWN_LINES = 15
_MAX_UNIX_PATH_BYTES = 107
_EXIT_WAIT_S = 5.0
_POLL_S = 0.01


def start_daemons(
    arguments: Sequence[str], number: int = 1, *, shows_log: bool = False
) -> list["ChildDaemon"]:
    """Engines of one model that share this machine; see `ChildDaemon`.
    Raises InvalidInput: their number is no positive one. EngineStartError: see there."""
    if not isinstance(number, int) or number < 1:
        raise InvalidInput(f"data_parallel_size is {number!r}, it must be a positive number")
    if number > 1:
        arguments = [*arguments, f"--data-parallel-size={number}"]
    return [
        ChildDaemon(
            [*arguments, f"--data-parallel-rank={rank}"] if number > 1 else arguments,
            shows_log=shows_log,
        )
        for rank in range(number)
    ]


class ChildDaemon:
    """`engine-core` started by this process, with which it ends, however that ends.
    Raises EngineStartError: the process could not be started.

    Args:
        arguments: of the command line, without `--bind`.
        bind: another address than a private socket; `address` is what became of it, once ready.
        command: what to run; default: the engine of this Python.
        shows_log: its standard error is this process's; else its last lines are kept for errors.
        on_line: gets each line of its standard error, in a thread.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        bind: str | None = None,
        command: Sequence[str] | None = None,
        shows_log: bool = False,
        on_line: Callable[[str], object] = lambda _line: None,
    ) -> None:
        if sys.platform == "win32":
            raise EngineStartError(NO_ENGINE_ON_WINDOWS)
        self._folder = Path(tempfile.mkdtemp(prefix="engine-"))  # mode 0700
        socket_path = self._folder / SOCKET_NAME
        self.address = bind or f"ipc://{socket_path}"
        if len(os.fsencode(socket_path)) > _MAX_UNIX_PATH_BYTES:
            self._folder.rmdir()
            raise EngineStartError(
                f"the socket path {socket_path} has {len(os.fsencode(socket_path))} bytes, the "
                f"system's limit is {_MAX_UNIX_PATH_BYTES}; set TMPDIR to a shorter folder"
            )
        self.restarts = "--supervise" in arguments
        """Whether an engine that died is started again, at the same address."""
        self._is_ready = False
        self.said: dict[str, Any] = {}
        """Its ready line."""
        self._shows_log = shows_log
        self._on_line = on_line
        self.tail: deque[str] = deque(maxlen=_NUM_SHOWN_LINES)
        self._ready: Future[str] = Future()
        self._exited: Future[int] = Future()
        program = command or python_module("engine_core.cli")
        # beside its input, which another child that is forked from this process keeps open
        watched = ("--parent-pid", str(os.getpid())) if sys.platform == "linux" else ()
        try:
            self.process = subprocess.Popen(
                [*program, *arguments, "--bind", self.address, "--exit-on-stdin-eof", *watched],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if shows_log else subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the client, which aborts its requests
            )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise EngineStartError(f"cannot run {program[0]}: {error.strerror}") from None
        self._threads = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_stdout, self._read_stderr_and_wait)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self._exited.done()

    @property
    def last_line(self) -> str:
        """The last line of its standard error."""
        return next((line for line in reversed(self.tail) if line.strip()), "")

    async def ready(self, timeout_s: float) -> None:
        """Return once the engine reports that it accepts requests.
        Raises EngineStartError: it ended first, or took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await asyncio.shield(asyncio.wrap_future(self._ready))
        except TimeoutError:
            raise EngineStartError(
                f"the engine was not ready within {timeout_s:g} s; raise startup_timeout_s. "
                f"{self.last_lines()}"
            ) from None
        if not line:
            report = await self.exit_report()
            raise EngineStartError(report, exit_code=self.process.returncode)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            self.said = json.loads(line)
            self._is_ready = self.said["event"] == "ready"
            self.address = self.said["address"]
        if not self._is_ready:
            raise EngineStartError(
                f"the engine's first line is not its ready line but {line.strip()!r}; check that "
                "frontend and engine_core are of the same release"
            )

    async def unless_it_ends(self, waiting: Coroutine[Any, Any, T]) -> T:
        """What `waiting` returns.
        Raises EngineDied: the process ended first; with its exit code and last lines."""
        task = asyncio.create_task(waiting)
        exited = asyncio.ensure_future(asyncio.shield(asyncio.wrap_future(self._exited)))
        try:
            await asyncio.wait((task, exited), return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                return await task
            raise EngineDied(await self.exit_report(), address=self.address)
        finally:
            exited.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            elif not task.cancelled():
                task.exception()  # it is told, or the end of the process says more

    async def exit_report(self) -> str:
        """How the process ended, with the last lines of its standard error. Waits a moment
        for a process that is just ending."""
        try:
            async with asyncio.timeout(_EXIT_WAIT_S):
                code = await asyncio.shield(asyncio.wrap_future(self._exited))
        except TimeoutError:
            return f"the engine at {self.address} is lost but still runs. {self.last_lines()}"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the engine at {self.address} {how}. {self.last_lines()}"

    async def wait(self) -> str:
        """How the process ended, once it has."""
        await asyncio.shield(asyncio.wrap_future(self._exited))
        return await self.exit_report()

    async def close(self) -> None:
        """End it: end of input, then SIGTERM, then SIGKILL. Calling it again does nothing."""
        process = self.process
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(OSError):  # it is dead already
                process.stdin.close()
        if not self._is_ready:
            process.terminate()  # it may not read its input yet
        for end in (process.terminate, process.kill):
            if not await self._has_ended():
                end()
        process.wait()
        for thread in self._threads:
            thread.join(_EXIT_WAIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _has_ended(self) -> bool:
        """Waits a while. Polls, as no thread can be started for it when the interpreter exits."""
        deadline_s = time.monotonic() + _EXIT_WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return self.process.poll() is not None

    def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self._ready.set_result(stream.readline())
            for _ in stream:  # nothing more is expected; a full pipe must not stop the engine
                pass

    def _read_stderr_and_wait(self) -> None:
        if self.process.stderr is not None:
            with self.process.stderr as stream:
                for line in stream:
                    self.tail.append(line.rstrip())
                    self._on_line(line.rstrip())
        code = self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # compilers and downloads that it left
        self._exited.set_result(code)

    def last_lines(self) -> str:
        if self._shows_log:
            return "Its log is above."
        if not self.tail:
            return "It wrote nothing to standard error."
        return "Its last lines:\n" + "\n".join(f"    {line}" for line in self.tail)
