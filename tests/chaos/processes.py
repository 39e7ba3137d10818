"""The processes of a run: a daemon and clients that the kernel kills with the driver, and how to
find any that is left."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

MARK = "CHAOS_RUN"
"""In the environment of every process of a run, its name."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _end_with_driver() -> None:
    """In the child: also a stopped process ends with the driver."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_python(module: str, *arguments: object, log: Path, stdout: Path | None = None):
    """`python -m module` with its stderr at the end of `log`."""
    with log.open("ab") as errors, (stdout or log).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=Path(__file__).parents[2],
            preexec_fn=_end_with_driver,
        )


def marked_processes(mark: str) -> list[int]:
    """Processes of a run that live, but for this one. One that is dead and not waited for has no
    environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in variables:
                found.append(int(folder.name))
    return found


def count_descriptors(pid: int) -> int:
    """Without that of packed weights: the first daemon on a machine makes them, others map them."""
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            count += path.readlink().suffix != ".weights"
    return count


class Daemon:
    """`engine-core` started by the driver; it may be its own child that serves (`--supervise`)."""

    def __init__(self, options: tuple[object, ...], folder: Path, *, is_supervised: bool) -> None:
        self.is_supervised = is_supervised
        self._stdout = folder / "ready"
        self._stdout.write_bytes(b"")
        supervise = ("--supervise", "--max-restarts", 1000) if is_supervised else ()
        self.process = start_python(
            "engine_core.cli", *options, *supervise, log=folder / "log", stdout=self._stdout
        )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def num_ready(self) -> int:
        """How many engines of it have been ready, one after the other."""
        return len([line for line in self._ready_lines() if line.endswith("}")])

    def ready(self) -> dict:
        return json.loads(self._ready_lines()[-1])

    def _ready_lines(self) -> list[str]:
        return self._stdout.read_text().split("\n")

    def engine_pid(self) -> int | None:
        """The process that serves; None while there is none."""
        pid = self.process.pid
        if not self.is_supervised:
            return pid if self.is_alive else None
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def send(self, number: signal.Signals, *, to_engine: bool = False) -> int | None:
        """To the process started, or to the engine. Returns whom it was sent to."""
        pid = self.engine_pid() if to_engine else self.process.pid
        if pid is not None and self.is_alive:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return None
        return pid


def is_gone(pid: int) -> bool:
    """Also if it is dead and nothing has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
