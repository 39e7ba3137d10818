"""One model on several workers of this machine, beside one worker with all its cores."""

import random
import statistics
import time
from typing import Annotated

from cyclopts import Parameter

from frontend import LLM, SamplingParams, TokensPrompt
from scripts.benchmarks import (
    DEFAULT_MODEL,
    Json,
    Model,
    Repeat,
    cpu_seconds,
    report,
    running_daemon,
)

NUM_PROMPTS, PROMPT, OUTPUT = (1, 32), 64, 64
Ways = Annotated[tuple[str, ...], Parameter(negative="", allow_leading_hyphen=True)]


def parallel(
    *,
    model: Model = DEFAULT_MODEL,
    ways: Ways = ("-tp 3", "-pp 2"),
    options: str = "--dtype float32",
    repeat: Repeat = 3,
    json: Json = None,
) -> None:
    """Random token ids, greedy, end-of-sequence ignored: 64 tokens in, 64 out, of 1 and of 32
    requests at once. A daemon for each way, in turn; tokens a second of outputs are medians.

    Args:
        ways: options of a group of workers, such as "-tp 3"; may be given several times.
        options: of all daemons.
    """
    figures = {way: measure(model, options, way, repeat) for way in ("", *ways)}
    header = f"{'workers':14}{'tok/s, 1':>10}{f'tok/s, {NUM_PROMPTS[1]}':>12}{'CPU s':>8}"
    lines = [header + "  of rank 0's model time in collectives"]
    for way, found in figures.items():
        rates = [found[f"tok_per_s_{number}"] for number in NUM_PROMPTS]
        shares = found["collective_share"]
        lines.append(
            f"{way or 'one':14}{rates[0]:>10.1f}{rates[1]:>12.1f}{found['cpu_s']:>8.1f}  "
            + ", ".join(
                f"{part} {share:.0%} ({found['collective_bytes_a_token'][part]:.0f} B/token)"
                for part, share in shares.items()
            )
        )
    report({"model": model, "options": options, "ways": figures}, json, "\n".join(lines))


def measure(model: str, options: str, way: str, repeat: int) -> dict[str, object]:
    arguments = ["--model", model, *options.split(), *way.split(), "--no-enable-prefix-caching"]
    with running_daemon(arguments) as (daemon, ready), LLM(address=ready["address"]) as llm:
        pids = [daemon.pid, *(worker["pid"] for worker in ready["workers"])]
        rng = random.Random(0)
        rates: dict[int, list[float]] = {number: [] for number in NUM_PROMPTS}
        time_generate(llm, [random_prompt(llm, rng, PROMPT)], 4)
        before, cpu_s = llm.statistics(), sum(map(cpu_seconds, pids))
        for _ in range(repeat):
            for number in NUM_PROMPTS:
                prompts = [random_prompt(llm, rng, PROMPT) for _ in range(number)]
                rates[number].append(number * OUTPUT / time_generate(llm, prompts, OUTPUT))
        after, cpu_s = llm.statistics(), sum(map(cpu_seconds, pids)) - cpu_s
        model_s = after.model_time_s - before.model_time_s
        num_tokens = repeat * sum(NUM_PROMPTS) * (PROMPT + OUTPUT)
        return {
            **{f"tok_per_s_{number}": statistics.median(found) for number, found in rates.items()},
            "cpu_s": cpu_s,
            "num_workers": after.num_workers,
            "collective_share": {
                part: (spent_s - before.collective_time_s.get(part, 0.0)) / model_s
                for part, spent_s in after.collective_time_s.items()
            },
            "collective_bytes_a_token": {
                part: (number - before.num_collective_bytes.get(part, 0)) / num_tokens
                for part, number in after.num_collective_bytes.items()
            },
        }


def random_prompt(llm: LLM, rng: random.Random, length: int) -> TokensPrompt:
    return {"prompt_token_ids": [rng.randrange(llm.model.vocab_size) for _ in range(length)]}


def time_generate(llm: LLM, prompts: list[TokensPrompt], max_tokens: int) -> float:
    """Seconds to finish them all."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - started_s
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    return elapsed_s
