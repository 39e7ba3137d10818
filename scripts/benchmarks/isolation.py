"""What the time to the first token tells one tenant of another's prompts. One sends a prompt, then
another times the same prompt and one that nobody has sent, each once a round."""

import random
from statistics import median
from typing import Annotated

from cyclopts import Parameter

from frontend import AsyncLLM, run
from scripts.benchmarks import DEFAULT_MODEL, Json, Model, Repeat, first_token_s, report


def isolation(
    *,
    model: Model = DEFAULT_MODEL,
    prompt_len: Annotated[int, Parameter(help="Tokens of each prompt.")] = 512,
    repeat: Repeat = 20,
    json: Json = None,
) -> int:
    """Without isolation the shorter time is that of the prompt that another has sent; with it in
    every second round, by chance."""
    figures = {
        name: run(measure(model, isolates, prompt_len, repeat))
        for name, isolates in (("shared", False), ("isolated", True))
    }
    report({"model": model, "prompt_len": prompt_len} | figures, json)
    return 0


async def measure(model: str, isolates: bool, prompt_len: int, rounds: int) -> dict[str, float]:
    """Medians of the second tenant's times, and in what share of the rounds the shorter time was
    that of the prompt that another had sent. The first round warms up."""
    generator = random.Random(0)
    times: dict[str, list[float]] = {"sent by another": [], "sent by nobody": []}
    async with (
        await AsyncLLM.launch(model, **({"isolate_tenants": True} if isolates else {})) as victim,
        AsyncLLM(victim.address) as prober,
    ):
        for _ in range(rounds + 1):
            secret, fresh = (
                [generator.randrange(100, victim.model.vocab_size) for _ in range(prompt_len)]
                for _ in range(2)
            )
            await first_token_s(victim, secret)
            kinds = list(zip(times, (secret, fresh), strict=True))
            generator.shuffle(kinds)
            for kind, prompt in kinds:
                times[kind].append(await first_token_s(prober, prompt))
    sent, fresh_s = (of_kind[1:] for of_kind in times.values())
    return {f"{kind} (s)": round(median(of_kind[1:]), 5) for kind, of_kind in times.items()} | {
        "guessed right": sum(map(float.__lt__, sent, fresh_s)) / rounds
    }
