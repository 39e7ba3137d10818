"""A process of its own for what users write: templates, grammars, foreign files. It has bounds on
time and memory; one that passes them, or crashes, ends with the request that made it."""

import atexit
import contextlib
import enum
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

_EXIT_WAIT_S = 5.0
_MAX_REFUSAL_CHARS = 4000
_OUT_OF_MEMORY = 77
"""Exit code."""
_ANSWER, _REFUSAL = b"+", b"-"


class SandboxLimits(msgspec.Struct, frozen=True):
    """What one request may take.

    Args:
        cpu_s: processor time.
        wall_s: time without an answer; for a machine that is too busy, and a process that was
            stopped. The start counts.
        memory_bytes: address space of the process; without effect on macOS.
        answer_bytes: of an answer; more is said only by a process that no longer follows its code.
        stack_bytes: of the thread that works.
        niceness: added to the caller's.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int
    answer_bytes: int
    stack_bytes: int = 8 << 20
    niceness: int = 0


class Ending(enum.Enum):
    """Why a process gave no answer."""

    NOT_STARTED = "not started"
    CPU_TIME = "processor time"
    MEMORY = "memory"
    WALL_TIME = "time without an answer"
    CRASH = "crash"


class SandboxEnded(Exception):
    """The process gave no answer.

    Args:
        ending: why.
        detail: what the system said, such as "by signal 11"; for the log and the user.
    """

    def __init__(self, ending: Ending, detail: str) -> None:
        super().__init__(f"{ending.value}: {detail}")
        self.ending = ending
        self.detail = detail


class SandboxRefused(Exception):
    """The process looked at the request and refuses it; the text is for the user."""


class SandboxProcess:
    """Answers one request at a time, for all threads. It is started with the first one, and again
    after it has ended.

    Frames are a length in 8 bytes and as many bytes; those of answers begin with "+" for a
    result or "-" for a refusal.

    Args:
        module: run with `-m`; it calls `serve_sandbox`.
        setup: called at each start, in the caller's process; `serve_sandbox` hands what it
            returns to its function.
    """

    def __init__(
        self, module: str, limits: SandboxLimits, *, setup: Callable[[], bytes] = bytes
    ) -> None:
        self._module = module
        self._limits = limits
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    @property
    def pid(self) -> int | None:
        """The running process's id."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Before the first `call`, which then need not wait for it. Says nothing of a failure."""
        with self._lock, contextlib.suppress(SandboxEnded, OSError):
            self._running()

    def call(self, request: bytes) -> bytes:
        """What the process answers.

        Raises:
            SandboxRefused: the request, by the process.
            SandboxEnded: it gave no answer; the next call starts another.
        """
        with self._lock:
            try:
                channel = self._running()
                _send(channel, request)
                head = _receive(channel, 9)
                num_bytes = min(int.from_bytes(head[:8], "little"), self._limits.answer_bytes)
                answer = _receive(channel, num_bytes)
            except TimeoutError:
                self._end()
                why = f"no answer within {self._limits.wall_s:g} s"
                raise SandboxEnded(Ending.WALL_TIME, why) from None
            except ConnectionError:
                raise self._why_it_ended() from None
            except BaseException:  # such as Ctrl-C: an answer would be taken for the next one's
                self._end()
                raise
        if head[8:] != _ANSWER:
            raise SandboxRefused(answer.decode("utf-8", "replace"))
        return answer

    def close(self) -> None:
        """End the process, if it is there and not at work. The next `call` starts another."""
        if self._lock.acquire(blocking=False):
            self._end()
            self._lock.release()

    def kill(self) -> None:
        """End the process also in the middle of a request, which raises SandboxEnded."""
        process = self._process
        if process is not None:
            process.kill()

    def _running(self) -> socket.socket:
        if self._socket is None or self._process is None or self._process.poll() is not None:
            self._end()
            if getattr(sys, "frozen", False) or not sys.executable:
                why = "this program has no Python interpreter to start"
                raise SandboxEnded(Ending.NOT_STARTED, why)
            if sys.platform == "win32":
                why = "Windows has no bounds for such a process; leave this to a server on Linux"
                raise SandboxEnded(Ending.NOT_STARTED, why)
            limits = msgspec.json.encode(self._limits).decode()
            command = [sys.executable, "-P", "-W", "ignore", "-m", self._module, limits]
            try:
                paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
                self._socket, theirs = socket.socketpair()
                with theirs:
                    self._process = subprocess.Popen(
                        command,
                        stdin=theirs.fileno(),
                        stdout=theirs.fileno(),
                        env={**os.environ, "PYTHONPATH": paths},
                    )
            except OSError as error:
                self._end()
                raise SandboxEnded(Ending.NOT_STARTED, f"{error.strerror}") from error
            self._socket.settimeout(self._limits.wall_s)
            _send(self._socket, self._setup())
        return self._socket

    def _end(self) -> None:
        """End the process at once: it has nothing to lose."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    def _why_it_ended(self) -> SandboxEnded:
        assert self._process is not None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_EXIT_WAIT_S)
        self._end()
        if code is None:
            return SandboxEnded(Ending.CRASH, "it closed its output and did not end")
        if code == -signal.SIGPROF:
            return SandboxEnded(Ending.CPU_TIME, f"more than {self._limits.cpu_s:g} s")
        if code == _OUT_OF_MEMORY:
            return SandboxEnded(Ending.MEMORY, f"more than {self._limits.memory_bytes >> 20} MiB")
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return SandboxEnded(Ending.CRASH, how)

    def _forget(self) -> None:
        """Forget the process in a forked child: it is the parent's."""
        self._process = self._socket = None
        self._lock = threading.Lock()


def serve_sandbox(
    make: Callable[[bytes], Callable[[bytes], bytes]], *, refusal: type[Exception]
) -> None:
    """In the process: answer until the input ends, within the limits that its starter gave.

    Args:
        make: called once with what the starter's `setup` made; what it returns is called for each
            request.
        refusal: an exception whose text the user gets; any other ends the process.
    """
    import resource

    limits = msgspec.json.decode(sys.argv[1], type=SandboxLimits)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(limits.niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    threading.stack_size(limits.stack_bytes)
    worker = threading.Thread(target=_work, args=(make, refusal, limits))
    worker.start()
    worker.join()


def _work(
    make: Callable[[bytes], Callable[[bytes], bytes]],
    refusal: type[Exception],
    limits: SandboxLimits,
) -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        if (setup := _read_frame(requests.read)) is None:
            return  # the starter was killed meanwhile
        handle = make(setup)
        while (request := _read_frame(requests.read)) is not None:
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            try:
                kind, answer = _ANSWER, handle(request)
            except refusal as error:
                kind, answer = _REFUSAL, str(error)[:_MAX_REFUSAL_CHARS].encode("utf-8", "replace")
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.write(len(answer).to_bytes(8, "little") + kind + answer)
            answers.flush()
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except BrokenPipeError:
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """None: the input has ended, in the middle of a frame perhaps."""
    if len(head := read(8)) < 8:
        return None
    num_bytes = int.from_bytes(head, "little")
    return data if len(data := read(num_bytes)) == num_bytes else None


def _send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(len(data).to_bytes(8, "little"))
    channel.sendall(data)


def _receive(channel: socket.socket, num_bytes: int) -> bytes:
    """Raises ConnectionError if it ends before."""
    received = bytearray()
    while len(received) < num_bytes:
        part = channel.recv(min(num_bytes - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError
        received += part
    return bytes(received)
