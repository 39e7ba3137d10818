"""Native CPU operations beside torch's: each at a model's shapes, then a whole model.

    python scripts/bench_cpu_operations.py operations
    python scripts/bench_cpu_operations.py model --model smollm2-135m-instruct
    python scripts/bench_cpu_operations.py overhead --rows 1,32,64 --weights int8

Backends take turns in one process; the best of several rounds is given. With `--threads 1` the time
is that of the one core's work, which other programs on the machine disturb little; with more it is
the wall clock's.

operations: each operation alone.
model: the real runner, without scheduler and sockets: decode of 1, 32 and 64 requests, a long
    prompt. First both choose greedy tokens: the run fails unless they are equal up to where torch's
    two best logits are nearer to each other than 0.001.
overhead: of a decode step, what is spent inside the library, and what around it.

The last line is one JSON document.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_core.model_files import ModelFiles, open_model_files
from kernels.cpu.library import THREADS_VARIABLE, load_library
from kernels.cpu.operations import CpuOperations
from kernels.cpu.packing import FloatFormat
from kernels.torch.operations import TorchOperations
from scripts.cpu_operations.cases import CASES
from scripts.cpu_operations.clock import time_in_turns
from scripts.cpu_operations.greedy_run import Answers, GreedyRun
from scripts.cpu_operations.overhead import MeasuredLibrary

NEAR_TIE = 1e-3
PROMPT_LENGTH = 64
Results = dict[str, dict[str, float]]


def bench_operations(only: str) -> Results:
    """Microseconds of both backends, and how many times as fast the native one is."""
    native, reference = CpuOperations(load_library()), TorchOperations()
    results: Results = {}
    print(f"{'':38}{'torch us':>10}{'native us':>11}{'times':>7}   {native.name}")
    for name, make in CASES.items():
        if only not in name:
            continue
        torch_s, native_s = time_in_turns([make(reference), make(native)], 4, 0.08)
        results[name] = {"torch_us": torch_s * 1e6, "native_us": native_s * 1e6}
        print(f"{name:38}{torch_s * 1e6:10.1f}{native_s * 1e6:11.1f}{torch_s / native_s:7.1f}")
    return results


def bench_model(files: ModelFiles, rows: list[int], num_output: int, long: int) -> Results:
    """Decode of each number of rows, and the first token of a prompt of `long` tokens."""
    runs = [
        GreedyRun(
            ops,
            files,
            max_rows=max(rows),
            max_length=long + num_output,
            max_tokens=max(max(rows) * (PROMPT_LENGTH + num_output), long + num_output),
        )
        for ops in (TorchOperations(), CpuOperations(load_library()))
    ]
    results: Results = {}
    for num_rows, length in [*((count, PROMPT_LENGTH) for count in rows), (1, long)]:
        wanted = num_output if length != long else 1
        prompts = random_prompts(files, num_rows, length)
        chunk = 256 if length == long else 1024
        answers = (run.generate(prompts, 16, chunk=chunk, with_margins=True) for run in runs)
        num_ties = check_tokens(*answers)
        best = [[float("inf")] * 2 for _ in runs]
        for _ in range(2):
            for run, kept in zip(runs, best, strict=True):
                timed = run.generate(prompts, wanted, chunk=chunk)
                kept[0], kept[1] = min(kept[0], timed.first_s), min(kept[1], timed.rest_s)
        (torch_first, torch_rest), (native_first, native_rest) = best
        line = (
            f"{num_rows:3} x {length}: first tokens {torch_first * 1e3:.0f} ms torch, "
            f"{native_first * 1e3:.0f} ms native ({torch_first / native_first:.2f} times)"
        )
        figures = {"torch_first_s": torch_first, "native_first_s": native_first}
        if wanted > 1:
            num_tokens = num_rows * (wanted - 1)
            line += (
                f"; decode {num_tokens / torch_rest:.1f} tok/s torch, "
                f"{num_tokens / native_rest:.1f} native ({torch_rest / native_rest:.2f} times)"
            )
            figures["torch_tok_s"] = num_tokens / torch_rest
            figures["native_tok_s"] = num_tokens / native_rest
        print(f"{line}; tokens equal, {num_ties} answers up to a near tie", flush=True)
        results[f"{num_rows} x {length}"] = figures
    return results


def random_prompts(files: ModelFiles, num_rows: int, length: int) -> list[list[int]]:
    """The same ones every time."""
    generator = np.random.default_rng(num_rows)
    drawn: list[list[int]] = generator.integers(
        0, int(files.config["vocab_size"]), (num_rows, length)
    ).tolist()
    return drawn


def check_tokens(reference: Answers, native: Answers) -> int:
    """How many answers part at a near tie; anything else ends the program."""
    num_ties = 0
    for row, (wanted, given) in enumerate(zip(reference.tokens, native.tokens, strict=True)):
        if wanted == given:
            continue
        at = next(i for i, (a, b) in enumerate(zip(wanted, given, strict=True)) if a != b)
        margin = reference.margins[row][at]
        if margin > NEAR_TIE:
            print(f"answer {row} differs at token {at}, where torch's best leads by {margin:.4f}")
            raise SystemExit(1)
        num_ties += 1
    return num_ties


def bench_overhead(
    files: ModelFiles, rows: list[int], num_output: int, weights: FloatFormat | None
) -> Results:
    """Milliseconds of a decode step: all of it, and what the library took.

    Args:
        weights: what they become; None: quantised ones run as the file holds them.
    """
    library = MeasuredLibrary(load_library())
    ops = CpuOperations(library, linear_weights=weights or "float32")
    length = PROMPT_LENGTH + num_output
    run = GreedyRun(
        ops,
        files,
        max_rows=max(rows),
        max_length=length,
        max_tokens=max(rows) * length,
        keeps_blocks=weights is None,
    )
    results: Results = {}
    for num_rows in rows:
        prompts = random_prompts(files, num_rows, PROMPT_LENGTH)
        best: tuple[float, float, dict[str, float]] | None = None
        for _ in range(4):
            answers = run.generate(prompts, num_output, after_first=library.reset)
            steps = num_output - 1
            by_name = {name: spent_s / steps for name, spent_s in library.by_name().items()}
            found = answers.rest_s / steps, sum(by_name.values()), by_name
            best = found if best is None or found[0] - found[1] < best[0] - best[1] else best
        assert best is not None
        total_s, library_s, by_name = best
        print(
            f"{num_rows:3} rows: a step {total_s * 1e3:.2f} ms, in the library "
            f"{library_s * 1e3:.2f} ms, around it {(total_s - library_s) * 1e3:.2f} ms "
            f"({(total_s / library_s - 1) * 100:.1f} %)"
        )
        for name, seconds in sorted(by_name.items(), key=lambda item: -item[1]):
            if seconds > 1e-6:
                print(f"      {name:24}{seconds * 1e3:9.3f} ms")
        results[str(num_rows)] = {"step_s": total_s, "library_s": library_s}
    return results


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["operations", "model", "overhead"])
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", default="1,32,64", help="requests decoded at once")
    parser.add_argument("--num-output", type=int, default=48)
    parser.add_argument("--long", type=int, default=2000, help="tokens of the long prompt")
    parser.add_argument("--weights", choices=["float32", "int8", "int4", "own"])
    parser.set_defaults(weights="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ[THREADS_VARIABLE] = str(options.threads)
    rows = [int(count) for count in options.rows.split(",")]
    if options.what == "operations":
        results = bench_operations(options.only)
    else:
        files = open_model_files(options.model, report=lambda line: print(line, file=sys.stderr))
        if options.what == "model":
            results = bench_model(files, rows, options.num_output, options.long)
        else:
            results = bench_overhead(
                files,
                rows,
                options.num_output,
                None if options.weights == "own" else options.weights,
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
