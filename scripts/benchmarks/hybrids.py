"""A hybrid of random weights, in turn with llama.cpp's tools on the same file."""

import json as json_format
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from frontend import LLM, RequestOutput, SamplingParams
from frontend.load.report import log
from scripts.benchmarks import Json, Repeat, Rows, report, running_daemon
from scripts.benchmarks.hybrid_files import SHAPES, write_hybrid
from scripts.comparison.processes import peak_memory_bytes

Rounds = dict[str, list[dict[str, float]]]
"""Figures by engine, a dict for each round."""
_BEFORE, _DECODED = 16, 32  # tokens of a stream
_NEXT_TURN = 40


class _Ours:
    def __init__(self, llm: LLM, vocabulary: int) -> None:
        self._llm, self._random, self._vocabulary = llm, Random(0), vocabulary

    def measure(self, prompts: Rows, streams: Rows) -> dict[str, float]:
        figures = {}
        for size in prompts:
            figures[f"prompt {size}"] = size / self._run([self._tokens(size)], 1)[0]
        for number in streams:
            first_s, _ = self._run([self._tokens(_BEFORE) for _ in range(number)], 1)
            texts = [self._tokens(_BEFORE) for _ in range(number)]
            all_s, _ = self._run(texts, 1 + _DECODED)
            figures[f"{number} streams"] = number * _DECODED / (all_s - first_s)
        prompt = self._tokens(max(prompts))
        _, [output] = self._run([prompt], _NEXT_TURN)
        again = [*prompt, *output.outputs[0].token_ids, *self._tokens(_NEXT_TURN)]
        figures["next turn's first token, s"], _ = self._run([again], 1)
        return figures

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(number)]

    def _run(self, prompts: list[list[int]], number: int) -> tuple[float, list[RequestOutput]]:
        params = SamplingParams(
            max_tokens=number, temperature=0.0, ignore_eos=True, detokenize=False
        )
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        started_s = time.perf_counter()
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - started_s, outputs


def _theirs(
    tools: Path, file: Path, threads: int, prompts: Rows, streams: Rows
) -> dict[str, float]:
    """Raises RuntimeError: a tool failed."""

    def run(tool: str, *words: object) -> list[dict[str, Any]]:
        command = [str(tools / tool), "-m", str(file), "-t", str(threads), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-500:]}")
        lines = done.stdout.splitlines()
        return [json_format.loads(line) for line in lines if line.startswith("{")]

    sizes = ",".join(map(str, prompts))
    found = run("llama-bench", "-p", sizes, "-n", 0, "-r", 1, "-o", "jsonl")
    figures = {f"prompt {each['n_prompt']}": each["avg_ts"] for each in found}
    numbers = ",".join(map(str, streams))
    context = max(streams) * (_BEFORE + _DECODED)
    words = ("-npp", _BEFORE, "-ntg", _DECODED, "-npl", numbers, "-c", context)
    for each in run("llama-batched-bench", *words, "--output-format", "jsonl"):
        figures[f"{each['pl']} streams"] = each["speed_tg"]
    return figures


def hybrids(
    *,
    shape: Annotated[
        Literal["0.8b", "4b", "moe", "tiny"], Parameter(help="Qwen 3.5's, in Q4_K_M.")
    ] = "0.8b",
    llama: Annotated[Path | None, Parameter(help="Folder of llama.cpp's built tools.")] = None,
    options: Annotated[str, Parameter(allow_leading_hyphen=True, help="Of the daemon.")] = "",
    prompts: Rows = (512, 4000),
    streams: Rows = (1, 16),
    threads: int = 2,
    repeat: Repeat = 3,
    json: Json = None,
) -> None:
    """Tokens a second of prompts, and of streams that decode; and how long the next turn of a
    conversation of the longest prompt waits. Both engines in turn; medians, and all runs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"qwen3.5-{shape}.gguf"
        write_hybrid(file, SHAPES[shape])
        vocabulary, words = SHAPES[shape].vocabulary, options.split()
        rounds, _ = in_turn(file, vocabulary, words, llama, prompts, streams, threads, repeat)
        size = file.stat().st_size
    facts = {"shape": shape, "file_bytes": size, "threads": threads, "options": options}
    report(facts | {"medians": medians_of(rounds), "rounds": rounds}, json)


def in_turn(
    file: Path,
    vocabulary: int,
    options: Sequence[str],
    llama: Path | None,
    prompts: Rows,
    streams: Rows,
    threads: int,
    repeat: int,
) -> tuple[Rounds, tuple[int, int]]:
    """Figures of both engines, and the most bytes that a daemon of ours had resident after its
    first answers, and after all, whose keys and values stay cached.
    Raises RuntimeError: a tool failed."""
    rounds: Rounds = {}
    words = ["--model", str(file), "--num-threads", str(threads), *options]
    with running_daemon(words) as (daemon, ready), LLM(address=ready["address"]) as llm:
        ours = _Ours(llm, vocabulary)
        ours.measure((min(prompts),), (1,))  # warms up
        at_first = peak_memory_bytes(daemon.pid)
        for _ in range(repeat):
            rounds.setdefault("engine-core", []).append(ours.measure(prompts, streams))
            if llama is not None:
                figures = _theirs(llama, file, threads, prompts, streams)
                rounds.setdefault("llama.cpp", []).append(figures)
            for name, each in rounds.items():
                log(f"{name:14}" + "  ".join(f"{k}: {v:.4g}" for k, v in each[-1].items()))
        return rounds, (at_first, peak_memory_bytes(daemon.pid))


def medians_of(rounds: Rounds) -> dict[str, dict[str, float]]:
    return {
        name: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for name, each in rounds.items()
    }
