"""Processes of an engine: their environment, what memory they hold, and how they end.

Owns process trees as /proc shows them. Must not know what the processes do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.1
_SAMPLES_A_LOOK = 3
_END_S = 15.0
_NUM_LAST_LINES = 12
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def environment_for(num_threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for an engine: its thread count, nothing of our Python, nothing
    fetched or reported. `extra` has the last word."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    threads = dict.fromkeys(_THREAD_VARIABLES, str(num_threads))
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | threads | quiet | dict(extra)


class ChildProcess:
    """A program in a process group of its own. Its standard error, and its standard output unless
    `on_line` takes that, are kept: the last lines here, all of it in `log`.

    Args:
        on_line: gets each line of standard output, in a thread.

    Raises:
        OSError: the program cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self._tail: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._log = log.open("a")
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError:
            self._log.close()
            raise
        self.pid = self._process.pid
        assert self._process.stdout is not None and self._process.stderr is not None
        self._threads = [
            threading.Thread(target=_each_line, args=(stream, take), daemon=True)
            for stream, take in (
                (self._process.stderr, self._keep),
                (self._process.stdout, on_line or self._keep),
            )
        ]
        for thread in self._threads:
            thread.start()

    def write_line(self, line: str) -> None:
        """To its standard input. A process that has ended does not read it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """How it ended, if it has, and what it said last."""
        code = self.exit_code
        if code is not None:
            for thread in self._threads:
                thread.join(1.0)
        how = "still runs" if code is None else f"ended with code {code}"
        said = " | ".join(line.strip() for line in self._tail if line.strip())
        return f"{how}; its last lines: {said[-1500:]}" if said else f"{how}; it said nothing"

    def end(self) -> None:
        """SIGTERM to the group, SIGKILL to whoever is left. Calling it again does nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            thread.join(1.0)
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _keep(self, line: str) -> None:
        self._tail.append(line)
        with contextlib.suppress(ValueError):  # closed: nobody asks any more
            self._log.write(line)
            self._log.flush()


def _each_line(stream: IO[str], take: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            take(line)


class MemoryWatch:
    """The most resident memory that groups of process trees held at one time, sampled ten times a
    second. Pages that two processes share count twice.

    Args:
        roots: by name, process ids whose trees are added up; asked for each third sample.
    """

    def __init__(self, roots: Callable[[], Mapping[str, Iterable[int]]]) -> None:
        self._roots = roots
        self._peaks: dict[str, int] = {}
        self._peak = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    @property
    def peaks_bytes(self) -> dict[str, int]:
        """Each group's own peak, and the peak of their sum as "all"; this moment included."""
        self._sample(self._trees())
        return self._peaks | {"all": self._peak}

    def _watch(self) -> None:
        trees = self._trees()
        count = 0
        while not self._stopping.wait(_SAMPLE_S):
            count += 1
            if count % _SAMPLES_A_LOOK == 0:
                trees = self._trees()
            self._sample(trees)

    def _trees(self) -> dict[str, list[int]]:
        return {
            name: [pid for root in pids for pid in process_tree(root)]
            for name, pids in self._roots().items()
        }

    def _sample(self, trees: Mapping[str, Iterable[int]]) -> None:
        now = {name: sum(map(resident_bytes, pids)) for name, pids in trees.items()}
        with self._lock:
            self._peaks = {name: max(held, self._peaks.get(name, 0)) for name, held in now.items()}
            self._peak = max(self._peak, sum(now.values()))


def process_tree(root: int) -> list[int]:
    """The process and all that descend from it. Empty if it is gone."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        threads = Path(f"/proc/{pid}/task")
        try:
            children = [(one / "children").read_text() for one in threads.iterdir()]
        except OSError:  # it ended meanwhile
            continue
        found.append(pid)
        waiting += [int(child) for line in children for child in line.split()]
    return found


def children_of_this_process() -> set[int]:
    """Ids of the processes that this one started and has not waited for."""
    threads = Path("/proc/self/task")
    lines = [(one / "children").read_text() for one in threads.iterdir()]
    return {int(child) for line in lines for child in line.split()}


def resident_bytes(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0
