"""The daemon over its socket on nano-vllm's workload; token ids."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from frontend import RequestOutputKind
from frontend.load.traces.arrivals import poisson
from protocol.calls import STEP_TOKENS_BOUNDS
from scripts.gpu.timing import TimingGroup
from tests.gpu.daemon_run import ClientRequest, ClientResult, DaemonRun, is_wrong
from tests.gpu.model_shapes import PUBLISHED, Shape

NUM_REQUESTS = 256
SHORTEST, LONGEST = 100, 1024
OPTIONS = ("--max-num-seqs", "256", "--max-model-len", "4096", "--max-num-batched-tokens", "8192")


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
    """The start's phases, and then the workload: with an output a token, and again with one a
    request, since a client that takes each token may be what is measured. Tokens a second from the
    first request's sending to the last one's end; engine_tok_s: of the engine's own steps.
    Raises RuntimeError: a request was not served as it asked."""
    prompts, num_outputs = workload(shape, number, shortest, longest)
    requests = [ClientRequest(*pair) for pair in zip(prompts, num_outputs, strict=True)]
    with DaemonRun(shape, device=device, options=options) as daemon:
        phases = daemon.phases()
        daemon.serve([ClientRequest(prompts[0], 8)])
        num_tokens = sum(num_outputs)

        def timed(kind: RequestOutputKind) -> tuple[list[ClientResult], dict[str, float]]:
            before, started_s = daemon.statistics(), time.perf_counter()
            seen = daemon.serve(requests, output_kind=kind)
            seconds = time.perf_counter() - started_s
            step_time_s = daemon.statistics().step_time_s - before.step_time_s
            for at, pair in enumerate(zip(requests, seen, strict=True)):
                if is_wrong(*pair, shape["vocab_size"]):
                    raise RuntimeError(f"request {at} of {number} was served wrongly: {seen[at]}")
            return seen, {
                "output_tok_s": round(num_tokens / seconds, 1),
                "seconds": round(seconds, 2),
                "engine_tok_s": round(num_tokens / step_time_s, 1),
            }

        seen, figures = timed(RequestOutputKind.DELTA)
        _, once = timed(RequestOutputKind.FINAL_ONLY)
        num_compiled = daemon.statistics().num_compilations_after_ready
        daemon.stop()
    first_tokens = sorted(each.first_token_s or 0.0 for each in seen)
    return (
        phases
        | figures
        | {f"final_only_{name}": figure for name, figure in once.items()}
        | {
            "median_first_token_s": round(first_tokens[number // 2], 3),
            "num_compilations_after_ready": num_compiled,
        }
    )


def measure_poisson(
    shape: Shape,
    *,
    rates: Sequence[float] = (5, 20),
    seconds: float = 60,
    prompt: tuple[int, int] = (100, 1000),
    output: tuple[int, int] = (50, 250),
    options: Sequence[str] = (*OPTIONS, "--capture-at-start"),
    device: str = "cuda",
) -> dict[str, Any]:
    """Requests that arrive at random, so many a second, one rate after the other: times to the
    first token and from one to the next as a client sees them, and how many steps had at most as
    many tokens. Raises RuntimeError: a request was not served as it asked."""
    figures: dict[str, Any] = {}
    with DaemonRun(shape, device=device, options=options) as daemon:
        daemon.serve([ClientRequest([1] * prompt[0], 8)])
        for rate in rates:
            draw, arrivals = random.Random(0), poisson(rate, np.random.default_rng(0))
            requests = [
                ClientRequest(
                    [draw.randrange(shape["vocab_size"]) for _ in range(draw.randint(*prompt))],
                    draw.randint(*output),
                    arrival_s=arrival_s,
                )
                for arrival_s in itertools.takewhile(lambda at: at < seconds, arrivals)
            ]
            before = daemon.statistics()
            seen = daemon.serve(requests)
            after = daemon.statistics()
            pairs = zip(requests, seen, strict=True)
            if any(is_wrong(*pair, shape["vocab_size"]) for pair in pairs):
                raise RuntimeError(f"a request of {len(requests)} was served wrongly")
            first = [each.first_token_s or 0.0 for each in seen]
            each_s = [
                ((one.last_token_s or 0.0) - at) / max(1, len(one.tokens) - 1)
                for one, at in zip(seen, first, strict=True)
            ]
            counts = np.subtract(after.num_steps_by_tokens, before.num_steps_by_tokens or 0)
            figures |= {
                f"{rate:g}/s {name}": value
                for name, value in {
                    "requests": len(requests),
                    **_spread("ttft", first),
                    **_spread("tpot", each_s),
                    "steps": after.num_steps - before.num_steps,
                    "steps_up_to": {
                        f"{bound}": int(count)
                        for bound, count in zip((*STEP_TOKENS_BOUNDS, "more"), counts, strict=True)
                        if count
                    },
                }.items()
            }
        figures["num_compilations_after_ready"] = daemon.statistics().num_compilations_after_ready
        daemon.stop()
    return figures


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median and the highest but 1 %, in milliseconds."""
    median, most = np.percentile(np.multiply(seconds, 1e3), (50, 99)).round(2).tolist()
    return {f"{name}_median_ms": median, f"{name}_p99_ms": most}


def _figures(name: str, figures: dict[str, Callable[[], dict[str, Any]]]) -> list[TimingGroup]:
    """Each measurement checks its own requests."""
    return [TimingGroup(name, lambda: 0.0, 0, figures=figures)]


_SMALL = f"Qwen3-0.6B, {NUM_REQUESTS} x {SHORTEST}-{LONGEST} in and out"


def daemon_timings() -> list[TimingGroup]:
    """Our own."""
    measured = partial(measure_daemon, PUBLISHED["Qwen3-0.6B"])
    return _figures("end to end", {f"daemon, {_SMALL}": measured})


def arriving_timings() -> list[TimingGroup]:
    """The same model as requests arrive at random; and where no bit may depend on the batch."""
    name, measured = (
        "daemon, Llama-3.1-8B, Poisson",
        partial(measure_poisson, PUBLISHED["Llama-3.1-8B"]),
    )
    options = (*OPTIONS, "--capture-at-start", "--batch-invariant")
    invariant = partial(measured, rates=(20,), seconds=30, options=options)
    return _figures("arriving", {name: measured, f"{name}, batch-invariant": invariant})


def long_timings() -> list[TimingGroup]:
    """A model that fills the device, if time is left."""
    measured = partial(measure_daemon, PUBLISHED["Llama-3.1-8B"], shortest=1000, longest=1000)
    return _figures("long", {f"daemon, Llama-3.1-8B, {NUM_REQUESTS} x 1000 in and out": measured})
