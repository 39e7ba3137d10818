"""From launch to ready and to the first token, and the daemon's memory, in a process of its own.

    python scripts/bench_startup.py [--model NAME] [--options "--dtype float32"] [--repeat 3]
        [--server "llama.cpp=llama-server -m FILE --port {port}"] [--json FILE]

Servers are OpenAI-compatible ones, launched in turn with the daemon (A B A B). The first launch is
not counted: it warms the file cache, and what is compiled or packed once is there from then on.
A table goes to stderr, one JSON document to stdout as the last line.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# `python scripts/bench_startup.py` puts only this folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from frontend import AsyncLLM, SamplingParams
from frontend.event_loop import run
from scripts.comparison.descriptions import DescriptionError
from scripts.comparison.figures import figures_of
from scripts.comparison.launching import Conditions, SystemFailed
from scripts.comparison.systems import ServerCommand
from scripts.comparison.workloads import PlannedRequest, Workload
from scripts.load.report import describe_run

Figures = dict[str, float]

PROMPT = list(range(1, 33))
OURS = "engine-core"
_STARTUP_TIMEOUT_S = 300.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USE_FROM_A_SCRIPT = """
import sys
from frontend import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    prompt = {"prompt_token_ids": list(range(1, 33))}
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    print("done", flush=True)
"""


def main() -> int:
    arguments = parse(sys.argv[1:])
    servers = [ServerCommand.parse(text) for text in arguments.server]
    measure(arguments.model, arguments.options)
    runs: dict[str, list[Figures]] = {OURS: [], **{server.name: [] for server in servers}}
    failed: dict[str, str] = {}
    for _ in range(arguments.repeat):
        runs[OURS].append(measure(arguments.model, arguments.options))
        if not arguments.options:
            runs[OURS][-1] |= measure_clients(arguments.model)
        for server in servers:
            try:
                runs[server.name].append(measure_server(server, arguments.model))
            except SystemFailed as error:
                failed[server.name] = str(error)
    medians = {name: median_of(each) for name, each in runs.items() if each}
    result: dict[str, Any] = describe_run() | {
        "model": arguments.model,
        "options": shlex.join(arguments.options),
        "runs": runs,
        "median": medians,
        "failed": failed,
    }
    for name, figures in medians.items():
        print(name, file=sys.stderr)
        for figure, value in figures.items():
            print(f"  {figure:32}{value:>16,}", file=sys.stderr)
    for name, reason in failed.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if failed else 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--options", type=shlex.split, default=[], help="of the daemon")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--server", action="append", default=[], help="NAME=COMMAND ... {port}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    if arguments.repeat < 1:
        parser.error(f"--repeat is {arguments.repeat}, it must be 1 or more")
    try:
        names = [ServerCommand.parse(text).name for text in arguments.server]
    except DescriptionError as error:
        parser.error(str(error))
    if len({OURS, *names}) <= len(names):
        parser.error(f"two are called alike: {', '.join([OURS, *names])}; give them other names")
    return arguments


def median_of(runs: Sequence[Mapping[str, float]]) -> Figures:
    """Of each figure that every run has."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in names}


def measure(model: str, options: Sequence[str] = ()) -> Figures:
    """One launch of the daemon.

    Raises:
        RuntimeError: it did not start; its own words are on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "engine_core.cli", "--model", model, *options]
        command += ["--bind", f"ipc://{folder}/engine.sock", "--log-level", "error"]
        started_s = time.perf_counter()
        daemon = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=plain_environment()
        )
        try:
            assert daemon.stdout is not None
            line = daemon.stdout.readline()
            if not line:
                raise RuntimeError(f"{shlex.join(command)} ended with code {daemon.wait()}")
            ready_s = time.perf_counter() - started_s
            cpu_s = cpu_seconds(daemon.pid)
            ready = json.loads(line)
            run(first_token(ready["address"]))
            first_token_s = time.perf_counter() - started_s
            peak_bytes = peak_memory_bytes(daemon.pid)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
    phases = {f"phase_{name}_s": spent_s for name, spent_s in ready["phases_s"].items()}
    return {
        "launch_to_ready_s": ready_s,
        "launch_to_first_token_s": first_token_s,
        "cpu_to_ready_s": cpu_s,
        **phases,
        "peak_memory_bytes": peak_bytes,
    }


async def first_token(address: str) -> None:
    async with AsyncLLM(address) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        async for _ in llm.generate({"prompt_token_ids": PROMPT}, params):
            pass


def measure_clients(model: str) -> Figures:
    """What a user waits for at a terminal, and with a script that starts an engine of its own."""
    return {
        "script_to_first_token_s": seconds_to_output("-c", _USE_FROM_A_SCRIPT, model),
        "help_s": seconds_to_end("-m", "engine_core.cli", "--help"),
        "import_frontend_s": seconds_to_end("-c", "import frontend"),
    }


def measure_server(server: ServerCommand, model: str) -> Figures:
    """One launch of another engine's server.

    Raises:
        SystemFailed: it did not get ready, or not serve the request.
    """
    request = PlannedRequest(0.0, PROMPT, 1)
    with tempfile.TemporaryDirectory() as logs:
        conditions = Conditions(
            model=model,
            num_threads=len(os.sched_getaffinity(0)),
            client_processes=1,
            startup_timeout_s=_STARTUP_TIMEOUT_S,
            workload_timeout_s=_STARTUP_TIMEOUT_S,
            logs=Path(logs),
        )
        with server.launch(conditions) as running:
            assert running.ready_s is not None
            workload = Workload("first token", (request,))
            answer = figures_of(workload, running.run(workload))
            return {
                "launch_to_ready_s": running.ready_s,
                # the client's own start is not counted, only what the request took
                "launch_to_first_token_s": running.ready_s + answer["duration_s"],
            }


def seconds_to_end(*arguments: str) -> float:
    """From the launch of a Python to exit code 0."""
    started_s = time.perf_counter()
    command = [sys.executable, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=plain_environment())
    return time.perf_counter() - started_s


def seconds_to_output(*arguments: str) -> float:
    """From the launch of a Python to its first line."""
    started_s = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, env=plain_environment()
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        elapsed_s = time.perf_counter() - started_s
    if not line or process.returncode:
        raise RuntimeError(f"{arguments[0]} ended with code {process.returncode}")
    return elapsed_s


def plain_environment() -> dict[str, str]:
    """Ours without what changes a Python's habits, such as to write no compiled modules."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[14 - 3]) + int(fields[15 - 3])) / _TICKS_PER_S


def peak_memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
