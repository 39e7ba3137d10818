"""The commands of `scripts/bench.py`, and what they share. Imports no torch."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from frontend import AsyncLLM, SamplingParams
from frontend.cli.options import option
from frontend.load.report import describe_run, log, write_document
from scripts.comparison.processes import EngineProcess

Json = Annotated[Path | None, Parameter(help="Write the document here too.")]
Model = Annotated[str, Parameter(help="A known model, a file or a folder.")]
Rows = Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative="")]
Repeat = Annotated[int, option("Medians of this many are reported.", gte=1)]
DEFAULT_MODEL = "smollm2-135m-instruct"
START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def running_daemon(options: Sequence[str]) -> Iterator[tuple[EngineProcess, dict[str, Any]]]:
    """`engine-core` with these options in a process of its own, and its ready line.
    Raises EngineFailed: it did not start."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "engine_core.cli", *options]
        command += ["--bind", f"ipc://{folder}/engine.sock", "--log-level", "error"]
        command += ["--exit-on-stdin-eof"]
        log = Path(folder) / "log"
        with EngineProcess(command, plain_environment(), log, answers=True) as daemon:
            yield daemon, daemon.ready_answer(START_TIMEOUT_S)


def plain_environment() -> dict[str, str]:
    """Ours without what changes a Python's habits, such as to write no compiled modules."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


async def first_token_s(llm: AsyncLLM, prompt: list[int]) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    async for _ in llm.generate({"prompt_token_ids": prompt}, params):
        pass
    return time.perf_counter() - started_s


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[14 - 3]) + int(fields[15 - 3])) / os.sysconf("SC_CLK_TCK")


def report(figures: Mapping[str, Any], json: Path | None, table: str = "") -> None:
    if table:
        log(table)
    write_document(describe_run() | figures, json)
