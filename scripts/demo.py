"""The main job on a real model: a daemon, three questions at once, statistics, an orderly stop.

    python scripts/demo.py [--model NAME]

The daemon is a process of its own, `engine-core`, which ends with this one.
"""

import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontend import AsyncLLM, EngineClientError, RequestOutputKind, SamplingParams, run
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
def demo(*, model: str = "smollm2-135m-instruct") -> int:
    """Start a daemon, ask it and stop it."""
    run(demonstrate(model))
    return 0


async def demonstrate(model: str) -> None:
    print(f"$ engine-core --model {model}", flush=True)
    started_s = time.perf_counter()
    async with await AsyncLLM.launch(model) as llm:
        print(f"ready after {time.perf_counter() - started_s:.1f} s at {llm.address}\n", flush=True)
        started_s = time.perf_counter()
        counts = await asyncio.gather(
            *(answer(llm, number, text) for number, text in enumerate(QUESTIONS, start=1))
        )
        elapsed_s = time.perf_counter() - started_s
        print(f"\n{sum(counts)} tokens for {len(counts)} questions at once in {elapsed_s:.1f} s\n")
        print("the engine, as `engine-client info` shows it:")
        print(as_lines(daemon_table(llm.address, llm.model, await llm.statistics()), "  "))
    print("the daemon has stopped")


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
    sys.exit(run_app(app, sys.argv[1:], failed=(EngineClientError,)))
