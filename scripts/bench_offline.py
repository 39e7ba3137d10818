"""Throughput and single-stream speed of this machine, through the daemon and the client library.

    python scripts/bench_offline.py [--model NAME] [--json FILE]

Two workloads, in random token ids (greedy, end-of-sequence ignored):
    batch    64 requests at once, prompt lengths log-uniform 32-512, 64 output tokens each
    single   one request, 64 tokens in, 128 out
Prints a table, and one JSON document as the last line.
"""

import argparse
import json
import math
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontend import LLM, SamplingParams
from scripts.load.report import describe_run

BATCH_SIZE, BATCH_OUTPUT = 64, 64
SINGLE_PROMPT, SINGLE_OUTPUT = 64, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeat", type=int, default=3, help="runs; the median is reported")
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    with LLM(model=arguments.model, enable_prefix_caching=False) as llm:
        runs = [measure(llm, seed) for seed in range(arguments.repeat)]
        result: dict[str, Any] = describe_run() | {"model": arguments.model, "runs": runs}
        result["median"] = {
            name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]
        }
        result["peak_memory_bytes"] = peak_memory_bytes()
    print(f"{'':28}{'median':>10}   of {arguments.repeat}", file=sys.stderr)
    for name, value in result["median"].items():
        print(f"{name:28}{value:>10}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def peak_memory_bytes() -> int:
    """Largest resident memory of this process or of the largest child that it waited for."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(each.ru_maxrss for each in usage) * 1024


def measure(llm: LLM, seed: int) -> dict[str, float]:
    """One run of both workloads."""
    random_source = random.Random(seed)
    prompts = [
        random_prompt(
            llm, random_source, round(math.exp(random_source.uniform(*map(math.log, (32, 512)))))
        )
        for _ in range(BATCH_SIZE)
    ]
    batch_s = time_generate(llm, prompts, BATCH_OUTPUT)
    single_prompt = [random_prompt(llm, random_source, SINGLE_PROMPT)]
    first_s = time_generate(llm, single_prompt, 1)
    single_s = time_generate(llm, single_prompt, SINGLE_OUTPUT)
    return {
        "batch_s": batch_s,
        "batch_prompt_tokens": sum(len(prompt["prompt_token_ids"]) for prompt in prompts),
        "batch_output_tok_per_s": BATCH_SIZE * BATCH_OUTPUT / batch_s,
        "single_ttft_ms": first_s * 1000,
        "single_decode_tok_per_s": (SINGLE_OUTPUT - 1) / (single_s - first_s),
    }


def random_prompt(llm: LLM, random_source: random.Random, length: int) -> dict[str, list[int]]:
    vocab_size = llm.model.vocab_size
    return {"prompt_token_ids": [random_source.randrange(vocab_size) for _ in range(length)]}


def time_generate(llm: LLM, prompts: list[dict[str, list[int]]], max_tokens: int) -> float:
    """Seconds to finish them all."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - started_s
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    return elapsed_s


if __name__ == "__main__":
    main()
