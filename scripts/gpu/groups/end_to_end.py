"""The daemon over its socket, with its client library on the same machine; token ids only.

The check asks for what the protocol promises: every request ends once, with as many tokens as it
asked for, whatever others do; it says nothing of which tokens (`whole_models` does).
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from scripts.gpu.frame import Check, Figure, Group
from scripts.gpu.model_shapes import QWEN3_SMALL, Shape

NUM_REQUESTS = 256
SHORTEST, LONGEST = 100, 1024
OPTIONS = ("--max-num-seqs", "256", "--max-model-len", "4096", "--max-num-batched-tokens", "8192")
PEER_LIMIT_S = 45.0


def check(
    shape: Shape,
    *,
    num_requests: int = 60,
    longest: int = 300,
    options: Sequence[str] = (*OPTIONS, "--num-blocks", "4096"),
    device: str = "cuda",
) -> float:
    """Other checks share the device, so that this daemon must not take its memory.

    Returns:
        How many of random requests, every fifth of whose clients goes away, were served wrongly;
        and 1 if the daemon did not end with exit code 0.
    """
    from scripts.gpu.daemon_run import DaemonRun

    requests = _requests(shape, num_requests, 1, longest)
    with DaemonRun(shape, device=device, options=options) as daemon:
        seen = daemon.serve(requests)
        # behind those that went away
        seen += daemon.serve(requests[1:5])
        wrong = daemon.stop() != 0
    asked = [*requests, *requests[1:5]]
    return float(wrong + sum(_is_wrong(*pair, shape) for pair in zip(asked, seen, strict=True)))


def _requests(shape: Shape, number: int, shortest: int, longest: int) -> list[Any]:
    from scripts.gpu.daemon_run import Wanted

    draw = random.Random(int(torch.randint(2**31, ())))
    requests = []
    for at in range(number):
        prompt = [draw.randrange(shape["vocab_size"]) for _ in range(draw.randint(1, longest))]
        num_output = draw.randint(shortest, longest)
        leave_after = draw.randint(1, num_output) if at % 5 == 0 else None
        requests.append(Wanted(prompt, num_output, leave_after))
    return requests


def _is_wrong(wanted: Any, seen: Any, shape: Shape) -> bool:
    if seen.is_late or any(not 0 <= token < shape["vocab_size"] for token in seen.tokens):
        return True
    if wanted.leave_after is not None and seen.num_ends == 0:
        return not wanted.leave_after <= len(seen.tokens) <= wanted.num_output
    has_all = len(seen.tokens) == wanted.num_output
    return not (seen.num_ends == 1 and seen.finish_reason == "length" and has_all)


def workload(
    shape: Shape, number: int, shortest: int, longest: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of output tokens of nano-vllm's benchmark, which has a fixed seed."""
    draw = random.Random(0)
    lengths = [draw.randint(shortest, longest) for _ in range(number)]
    prompts = [[draw.randrange(shape["vocab_size"]) for _ in range(n)] for n in lengths]
    return prompts, [draw.randint(shortest, longest) for _ in range(number)]


def measure_daemon(
    shape: Shape,
    *,
    number: int = NUM_REQUESTS,
    shortest: int = SHORTEST,
    longest: int = LONGEST,
    options: Sequence[str] = (*OPTIONS, "--capture-at-start"),
    device: str = "cuda",
) -> dict[str, Any]:
    """The start's phases, and then the workload; tokens a second from the first request's sending
    to the last one's end.

    Raises:
        RuntimeError: a request was not served as it asked.
    """
    from scripts.gpu.daemon_run import DaemonRun, Wanted

    prompts, num_outputs = workload(shape, number, shortest, longest)
    requests = [Wanted(*pair) for pair in zip(prompts, num_outputs, strict=True)]
    with DaemonRun(shape, device=device, options=options) as daemon:
        phases = daemon.phases()
        daemon.serve([Wanted(prompts[0], 8)])
        started_s = time.perf_counter()
        seen = daemon.serve(requests)
        seconds = time.perf_counter() - started_s
        daemon.stop()
    wrong = [
        at for at, pair in enumerate(zip(requests, seen, strict=True)) if _is_wrong(*pair, shape)
    ]
    if wrong:
        raise RuntimeError(f"request {wrong[0]} of {number} was served wrongly: {seen[wrong[0]]}")
    first_tokens = sorted(each.first_token_s or 0.0 for each in seen)
    return phases | {
        "output_tok_s": round(sum(num_outputs) / seconds, 1),
        "seconds": round(seconds, 2),
        "median_first_token_s": round(first_tokens[number // 2], 3),
    }


def measure_peer(shape: Shape, *, device: str = "cuda") -> dict[str, Any]:
    """transformers' continuous batching on the same workload, in this process."""
    from scripts.gpu.peers import measure_transformers

    prompts, num_outputs = workload(shape, NUM_REQUESTS, SHORTEST, LONGEST)
    return measure_transformers(shape, prompts, num_outputs, limit_s=PEER_LIMIT_S, device=device)


def group() -> Group:
    name = "every request ends once"
    small = {**QWEN3_SMALL, "num_hidden_layers": 2}
    checks = (Check(name, functools.partial(check, small), 0),)
    figures = (
        Figure(
            "daemon, Qwen3-0.6B, 256 x 100-1024 in and out",
            name,
            functools.partial(measure_daemon, QWEN3_SMALL),
        ),
        Figure(
            "transformers, Qwen3-0.6B, 256 x 100-1024 in and out",
            name,
            functools.partial(measure_peer, QWEN3_SMALL),
        ),
    )
    return Group("end_to_end", checks, figures=figures, needs_engine=True)
