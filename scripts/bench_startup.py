"""From launch to ready and to the first token, and the daemon's memory, in a process of its own.

    python scripts/bench_startup.py [--model NAME] [--json FILE]

The file cache is warm from the second run on. Prints one JSON document as the last line.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from benchmark_report import describe_run

from frontend import AsyncLLM, SamplingParams
from frontend.event_loop import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs = [measure(arguments.model) for _ in range(arguments.repeat)]
    result: dict[str, Any] = describe_run() | {"model": arguments.model, "runs": runs}
    result["median"] = {
        name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]
    }
    for name, value in result["median"].items():
        print(f"{name:32}{value:>16,}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(model: str) -> dict[str, float]:
    """One launch."""
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        daemon = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "engine_core.cli",
                "--model",
                model,
                "--bind",
                f"ipc://{folder}/engine.sock",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert daemon.stdout is not None
        ready = json.loads(daemon.stdout.readline())
        ready_s = time.perf_counter() - started_s
        run(first_token(ready["address"]))
        first_token_s = time.perf_counter() - started_s
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return {
        "launch_to_ready_s": ready_s,
        "launch_to_first_token_s": first_token_s,
        "peak_memory_bytes": int(peak_kib) * 1024,
    }


async def first_token(address: str) -> None:
    async with AsyncLLM(address) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        async for _ in llm.generate({"prompt_token_ids": list(range(1, 33))}, params):
            pass


if __name__ == "__main__":
    main()
