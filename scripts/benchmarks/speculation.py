"""Speculative decoding beside plain decoding, in turn: two daemons of equal options but one."""

import contextlib
import statistics
import time
from typing import Annotated, Literal

from cyclopts import Parameter

from frontend import LLM, RequestOutput, SamplingParams
from frontend.load.report import log
from scripts.benchmarks import (
    DEFAULT_MODEL,
    Json,
    Model,
    Repeat,
    Rows,
    cpu_seconds,
    report,
    running_daemon,
)
from scripts.benchmarks.speculation_prompts import chat_prompts, copy_prompts

_WEIGHTS = {"float32": ("--dtype", "float32"), "q4": ("--quantization", "int4")}
_MOST_TOKENS = {"copy": 224, "chat": 96}


def speculation(
    *,
    model: Model = DEFAULT_MODEL,
    speculative: Annotated[str, Parameter(help="As engine-core's option.")] = "ngram",
    weights: Annotated[
        tuple[Literal["float32", "q4"], ...], Parameter(consume_multiple=True, negative="")
    ] = ("float32", "q4"),
    batch: Rows = (1, 4, 16),
    repeat: Repeat = 3,
    json: Json = None,
) -> None:
    """Tokens per second with and without drafts, greedy, on prompts whose plain output repeats at
    least 60 % of their 4-grams (lists to be given again), and on chat. The runs of both engines
    follow one another; a figure is the median of the pairs' ratios. Tokens must be equal."""
    figures = {}
    for kind in weights:
        with contextlib.ExitStack() as stack:
            engines = [
                _Engine(stack, ["--model", model, *_WEIGHTS[kind], *options])
                for options in ([], ["--speculative", speculative])
            ]
            prompts = {"copy": _copied(engines[0]), "chat": chat_prompts()}
            for work, texts in prompts.items():
                for number in batch:
                    name = f"{kind} {work} batch {number}"
                    figures[name] = _compare(engines, texts[:number], work, repeat)
                    log(f"{name:24}" + "  ".join(f"{k} {v}" for k, v in figures[name].items()))
    report({"model": model, "speculative": speculative, "figures": figures}, json)


class _Engine:
    def __init__(self, stack: contextlib.ExitStack, options: list[str]) -> None:
        daemon, ready = stack.enter_context(
            running_daemon([*options, "--no-enable-prefix-caching"])
        )
        self.pid = daemon.pid
        self.llm = stack.enter_context(LLM(address=ready["address"]))

    def run(self, texts: list[str], max_tokens: int) -> tuple[list[RequestOutput], float, float]:
        """Outputs, seconds, and the daemon's seconds of CPU."""
        chats = [[{"role": "user", "content": text}] for text in texts]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        cpu_s, started_s = cpu_seconds(self.pid), time.perf_counter()
        outputs = self.llm.chat(chats, params, use_tqdm=False)
        return outputs, time.perf_counter() - started_s, cpu_seconds(self.pid) - cpu_s


def _copied(plain: _Engine) -> list[str]:
    """The prompts of which this model's plain output repeats 60 % of the 4-grams."""
    texts = copy_prompts()
    outputs, _, _ = plain.run(texts, _MOST_TOKENS["copy"])
    return [text for text, output in zip(texts, outputs, strict=True) if _share(output) >= 0.6]


def _share(output: RequestOutput) -> float:
    prompt, tokens = _grams(output.prompt_token_ids or []), _grams(output.outputs[0].token_ids)
    return len(prompt & tokens) / len(prompt)


def _grams(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)}


def _compare(engines: list[_Engine], texts: list[str], work: str, repeat: int) -> dict[str, float]:
    """Raises RuntimeError: a token differs."""
    seconds, cpu, tokens, num_tokens = [], [], [], 0
    for engine in engines * repeat:
        outputs, wall_s, cpu_s = engine.run(texts, _MOST_TOKENS[work])
        tokens.append([output.outputs[0].token_ids for output in outputs])
        num_tokens = sum(map(len, tokens[-1]))
        seconds.append(wall_s)
        cpu.append(cpu_s)
        if tokens[-1] != tokens[0]:
            raise RuntimeError(f"{work}: tokens with drafts differ from those without")
    return {
        "plain_tok_per_s": round(num_tokens / statistics.median(seconds[::2]), 1),
        "tok_per_s": round(num_tokens / statistics.median(seconds[1::2]), 1),
        "ratio": _ratio(seconds),
        "cpu_ratio": _ratio(cpu),
        "num_prompts": len(texts),
    }


def _ratio(seconds: list[float]) -> float:
    """The median ratio of the pairs without and with drafts."""
    pairs = zip(seconds[::2], seconds[1::2], strict=True)
    return round(statistics.median(plain / drafted for plain, drafted in pairs), 3)
