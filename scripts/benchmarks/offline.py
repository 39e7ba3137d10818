"""Throughput and single-stream speed of this machine, through the daemon and the client library."""

import math
import random
import resource
import statistics
import time

from frontend import LLM, SamplingParams, TokensPrompt
from scripts.benchmarks import DEFAULT_MODEL, Json, Model, Repeat, report

BATCH_SIZE, BATCH_PROMPT, BATCH_OUTPUT = 64, (32, 512), 64
SINGLE_PROMPT, SINGLE_OUTPUT = 64, 128


def offline(*, model: Model = DEFAULT_MODEL, repeat: Repeat = 3, json: Json = None) -> None:
    """Random token ids, greedy, end-of-sequence ignored. Batch: 64 requests at once, prompt lengths
    log-uniform 32-512, 64 output tokens each. Single: one request, 64 tokens in, 128 out."""
    with LLM(model=model, enable_prefix_caching=False) as llm:
        runs = [measure_once(llm, seed) for seed in range(repeat)]
        medians = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
        # of this process, or of the largest child that it waited for
        usage = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        peak_bytes = max(each.ru_maxrss for each in usage) * 1024
    lines = [f"{name:28}{value:>10}" for name, value in medians.items()]
    table = "\n".join([f"{'':28}{'median':>10}   of {repeat}", *lines])
    figures = {"model": model, "runs": runs, "median": medians, "peak_memory_bytes": peak_bytes}
    report(figures, json, table)


def measure_once(llm: LLM, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    low, high = map(math.log, BATCH_PROMPT)
    prompts = [
        random_prompt(llm, rng, round(math.exp(rng.uniform(low, high)))) for _ in range(BATCH_SIZE)
    ]
    batch_s = time_generate(llm, prompts, BATCH_OUTPUT)
    single_prompt = [random_prompt(llm, rng, SINGLE_PROMPT)]
    first_s = time_generate(llm, single_prompt, 1)
    single_s = time_generate(llm, single_prompt, SINGLE_OUTPUT)
    return {
        "batch_s": batch_s,
        "batch_prompt_tokens": sum(len(prompt["prompt_token_ids"]) for prompt in prompts),
        "batch_output_tok_per_s": BATCH_SIZE * BATCH_OUTPUT / batch_s,
        "single_ttft_ms": first_s * 1000,
        "single_decode_tok_per_s": (SINGLE_OUTPUT - 1) / (single_s - first_s),
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
