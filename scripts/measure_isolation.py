"""Measure what the time to the first token tells one tenant of another's prompts.

One tenant sends a prompt, then another times the same prompt and one that nobody has sent, each
once a round. Without --isolate-tenants the first is faster in each round; with it in every second
one, by chance. The last line is JSON, with times in seconds.
"""

import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import Parameter

from frontend import AsyncLLM, SamplingParams
from frontend.errors import EngineClientError
from frontend.event_loop import run
from scripts.command_line import make_app, run_app

app = make_app("measure_isolation", __doc__ or "")


@app.default
def measure(
    model: str = "smollm2-135m-instruct",
    *,
    prompt_len: Annotated[int, Parameter(help="Tokens of each prompt.")] = 512,
    rounds: Annotated[int, Parameter(help="Of each kind of engine.")] = 20,
) -> int:
    """Measure with and without isolation."""
    document = {
        name: run(_measure(model, isolates, prompt_len, rounds))
        for name, isolates in (("shared", False), ("isolated", True))
    }
    for name, found in document.items():
        print(f"{name:<9}", ", ".join(f"{kind} {number:.4g}" for kind, number in found.items()))
    print(json.dumps(document))
    return 0


async def _measure(model: str, isolates: bool, prompt_len: int, rounds: int) -> dict[str, float]:
    """Medians of the second tenant's times to the first token, and in what share of the rounds
    the shorter time was that of the prompt that another had sent."""
    generator = random.Random(0)
    options = {"isolate_tenants": True} if isolates else {}
    times: dict[str, list[float]] = {"sent by another": [], "sent by nobody": []}
    async with (
        await AsyncLLM.launch(model, **options) as victim,
        AsyncLLM(victim.address) as prober,
    ):
        for _ in range(rounds + 1):
            secret, fresh = (
                [generator.randrange(100, victim.model.vocab_size) for _ in range(prompt_len)]
                for _ in range(2)
            )
            await _first_token_s(victim, secret)
            kinds = list(zip(times, (secret, fresh), strict=True))
            generator.shuffle(kinds)
            for kind, prompt in kinds:
                times[kind].append(await _first_token_s(prober, prompt))
    sent, fresh_s = (of_kind[1:] for of_kind in times.values())
    return {f"{kind} (s)": round(median(of_kind[1:]), 5) for kind, of_kind in times.items()} | {
        "guessed right": sum(map(float.__lt__, sent, fresh_s)) / rounds
    }


async def _first_token_s(llm: AsyncLLM, prompt: list[int]) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    async for _ in llm.generate({"prompt_token_ids": prompt}, params):
        pass
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:], failed=(EngineClientError,)))
