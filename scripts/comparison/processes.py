"""An engine's process: its environment, its answers in lines of JSON, its memory, its end."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

_END_S = 15.0
_POLL_S = 0.05
_NUM_LAST_CHARACTERS = 1500
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


class EngineFailed(RuntimeError):
    """The engine did not start, or not answer as it should. The text has its last output."""


def environment_for(num_threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for an engine: its thread count, no variables of our Python,
    offline, no reports home. `extra` overrides all of it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    threads = dict.fromkeys(_THREAD_VARIABLES, str(num_threads))
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | threads | quiet | dict(extra)


class EngineProcess:
    """A program in a process group of its own, which ends with the block. Its output is appended to
    `log`. `answers`: standard output is lines of JSON for `next_answer`, and is not logged. Raises
    EngineFailed: there is no such program."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, answers: bool
    ) -> None:
        self._log_path = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._started_s = time.perf_counter()
        self._pending = b""
        with log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if answers else output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineFailed(f"{command[0]} cannot be run: {error.strerror}") from error
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """SIGTERM to the group, SIGKILL to what is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        finally:  # also when a signal ends this process meanwhile
            self._signal(signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    @property
    def since_launch_s(self) -> float:
        return time.perf_counter() - self._started_s

    def write_line(self, line: str) -> None:
        """To its standard input. A process that has ended does not read it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Raises EngineFailed: the process ended, or is not ready in time."""
        while not is_ready():
            if self._process.poll() is not None:
                raise EngineFailed(self._last_output("the process"))
            if self.since_launch_s > timeout_s:
                raise EngineFailed(self._last_output(f"not ready after {timeout_s:g} s:"))
            time.sleep(_POLL_S)

    def next_answer(self, timeout_s: float) -> dict[str, Any]:
        """Raises EngineFailed: the process ended, gave no line in time, or one that is not JSON."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        deadline = time.perf_counter() + timeout_s
        while b"\n" not in self._pending:
            left_s = max(0.0, deadline - time.perf_counter())
            if not select.select([file], [], [], left_s)[0]:
                raise EngineFailed(self._last_output(f"no answer in {timeout_s:g} s:"))
            part = os.read(file, 2**16)
            if not part:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
                raise EngineFailed(self._last_output("the process"))
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise EngineFailed(f"an answer that is not JSON: {error}") from error

    def ready_answer(self, timeout_s: float) -> dict[str, Any]:
        """Raises EngineFailed: the first answer is another one, or there is none."""
        first = self.next_answer(timeout_s)
        if first.pop("event", None) != "ready":
            raise EngineFailed(f"not ready: {first.get('reason', first)}")
        return first

    def _last_output(self, fault: str) -> str:
        code = self._process.poll()
        how = "still runs" if code is None else f"ended with code {code}"
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        output = " | ".join(line.strip() for line in lines if line.strip())
        last = f"its last lines: {output[-_NUM_LAST_CHARACTERS:]}" if output else "it wrote nothing"
        return f"{fault} {how}; {last}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def process_tree(root: int) -> Iterable[int]:
    """The process and all that descend from it. Empty if it has ended."""
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):  # it ended meanwhile
            waiting += children_of(pid)
            yield pid


def children_of(pid: int) -> list[int]:
    """Ids of the processes that it started and has not waited for. Raises OSError: it has ended."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            found += map(int, (thread / "children").read_text().split())
    return found


def peak_memory_bytes(pid: int) -> int:
    """The most that it had resident so far; 0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return 0
