"""The main job on a real model: a daemon, three questions at once, statistics, an orderly stop.

    python scripts/demo.py [--model NAME]

Starts `engine-core` as a daemon, then itself a second time as a client (--ask ADDRESS).
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontend import AsyncLLM, RequestOutputKind, SamplingParams, run
from frontend.cli.info import as_lines, daemon_table
from scripts.command_line import make_app, run_app

# whose answers this small model is sure of, so that no processor's rounding changes their sense
QUESTIONS = (
    "What is the capital of Japan?",
    "What is a computer? Answer in one sentence.",
    "What is photosynthesis? Answer in one sentence.",
)
app = make_app("demo", __doc__)


@app.default
def demo(
    *,
    model: str = "smollm2-135m-instruct",
    ask: Annotated[str | None, Parameter(help="Be the client of this running daemon.")] = None,
) -> int:
    """Start a daemon and ask it, or only ask."""
    if ask is None:
        return demonstrate(model)
    run(ask_questions(ask))
    return 0


def demonstrate(model: str) -> int:
    with tempfile.TemporaryDirectory(prefix="engine-core-demo-") as folder:
        address = f"ipc://{Path(folder) / 'engine.sock'}"
        command = [sys.executable, "-m", "engine_core.cli", "--model", model, "--bind", address]
        command += ["--exit-on-stdin-eof"]  # it ends with this program, however that ends
        print(f"$ engine-core --model {model} --bind {address}", flush=True)
        daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert daemon.stdout is not None
            line = daemon.stdout.readline()
            if not line:
                print("the daemon did not start", file=sys.stderr)
                return daemon.wait() or 1
            ready = json.loads(line)
            print(f"ready after {ready['ready_s']} s at {ready['address']}\n", flush=True)
            client = subprocess.run([sys.executable, __file__, "--ask", ready["address"]])
        finally:
            daemon.terminate()
            exit_code = daemon.wait(timeout=60)
        print(f"the daemon stopped with exit code {exit_code}")
        return client.returncode or exit_code


async def ask_questions(address: str) -> None:
    async with AsyncLLM(address) as llm:
        started_s = time.perf_counter()
        counts = await asyncio.gather(
            *(answer(llm, number, text) for number, text in enumerate(QUESTIONS, start=1))
        )
        elapsed_s = time.perf_counter() - started_s
        print(f"\n{sum(counts)} tokens for {len(counts)} questions at once in {elapsed_s:.1f} s\n")
        print("the engine, as `engine-client info` shows it:")
        print(as_lines(daemon_table(llm.address, llm.model, await llm.statistics()), "  "))


async def answer(llm: AsyncLLM, number: int, question: str) -> int:
    """Stream one answer, a line at a time, as the three share the terminal."""
    print(f"[{number}] {question}", flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=96, output_kind=RequestOutputKind.DELTA)
    pending, num_tokens = "", 0
    async for output in llm.chat([{"role": "user", "content": question}], params):
        pending += output.outputs[0].text
        num_tokens += len(output.outputs[0].token_ids)
        # whole words, as the three share the terminal
        if len(pending) > 60 and " " in pending.strip():
            line, _, pending = pending.rpartition(" ")
            print(f"    [{number}] {line.strip()}", flush=True)
    print(f"    [{number}] {pending.strip()}", flush=True)
    return num_tokens


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
