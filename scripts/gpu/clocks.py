"""The clock of a GPU's multiprocessors and its power, watched while something runs."""

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

Clocks = dict[str, float]
_COMMAND = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")
_INTERVAL_MS = 200


@contextlib.contextmanager
def watched_clocks() -> Iterator[Callable[[], Clocks]]:
    """Gives what reads the last sample of the first GPU: {"sm_mhz", "watts"}; {} without
    nvidia-smi, or before the first sample."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples")
        command = [*_COMMAND, f"--loop-ms={_INTERVAL_MS}", "--id=0"]
        try:
            with path.open("w") as samples:
                process = subprocess.Popen(command, stdout=samples, stderr=subprocess.DEVNULL)
        except OSError:
            yield dict
            return
        try:
            yield lambda: _last(path.read_text())
        finally:
            process.kill()
            process.wait()


def _last(text: str) -> Clocks:
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):  # a line half written, or "[N/A]"
            clock, power = line.split(",")
            return {"sm_mhz": float(clock), "watts": float(power)}
    return {}
