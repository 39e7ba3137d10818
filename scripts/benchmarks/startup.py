"""From launch to ready and to the first token, and the daemon's memory, in a process of its own."""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from frontend import AsyncLLM, run
from scripts.benchmarks import (
    DEFAULT_MODEL,
    Json,
    Model,
    Repeat,
    cpu_seconds,
    first_token_s,
    plain_environment,
    report,
    running_daemon,
)
from scripts.comparison.figures import Figures, medians
from scripts.comparison.processes import peak_memory_bytes

PROMPT = list(range(1, 33))
_USE_FROM_A_SCRIPT = """
import sys
from frontend import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    prompt = {"prompt_token_ids": list(range(1, 33))}
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    print("done", flush=True)
"""


def startup(
    *,
    model: Model = DEFAULT_MODEL,
    options: Annotated[str, Parameter(allow_leading_hyphen=True, help="Of the daemon.")] = "",
    repeat: Repeat = 3,
    json: Json = None,
) -> None:
    """The first launch is not counted: it warms the file cache, and what is compiled or packed once
    is there from then on."""
    words = shlex.split(options)
    measure_daemon(model, words)
    runs = []
    for _ in range(repeat):
        runs.append(measure_daemon(model, words))
        if not words:
            runs[-1] |= measure_clients(model)
    figures = {name: round(value, 3) for name, value in medians(runs).items()}
    table = "\n".join(f"{name:32}{value:>16,}" for name, value in figures.items())
    report({"model": model, "options": options, "runs": runs, "median": figures}, json, table)


def measure_daemon(model: str, options: Sequence[str]) -> Figures:
    """One launch of the daemon. Raises EngineFailed: it did not start."""
    with running_daemon(["--model", model, *options]) as (daemon, ready):
        ready_s = daemon.since_launch_s
        cpu_s = cpu_seconds(daemon.pid)
        run(ask(ready["address"]))
        answered_s = daemon.since_launch_s
        peak_bytes = peak_memory_bytes(daemon.pid)
    return {
        "launch_to_ready_s": ready_s,
        "launch_to_first_token_s": answered_s,
        "cpu_to_ready_s": cpu_s,
        **{f"phase_{name}_s": spent_s for name, spent_s in ready["phases_s"].items()},
        "peak_memory_bytes": peak_bytes,
    }


async def ask(address: str) -> None:
    async with AsyncLLM(address) as llm:
        await first_token_s(llm, PROMPT)


def measure_clients(model: str) -> Figures:
    """What a user waits for at a terminal, and with a script that starts an engine of its own."""
    return {
        "script_to_first_token_s": seconds_of("-c", _USE_FROM_A_SCRIPT, model, to_first_line=True),
        "help_s": seconds_of("-m", "engine_core.cli", "--help"),
        "import_frontend_s": seconds_of("-c", "import frontend"),
    }


def seconds_of(*arguments: str, to_first_line: bool = False) -> float:
    """From the launch of a Python to its end, or to its first line of output."""
    started_s = time.perf_counter()
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=plain_environment()) as process:
        assert process.stdout is not None
        (process.stdout.readline if to_first_line else process.communicate)()
        elapsed_s = time.perf_counter() - started_s
    if process.returncode:
        raise RuntimeError(f"python {arguments[0]} ended with code {process.returncode}")
    return elapsed_s
