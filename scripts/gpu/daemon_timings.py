"""The daemon over its socket on nano-vllm's workload, and transformers on the same; token ids."""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from frontend import RequestOutputKind
from scripts.gpu.timing import TimingGroup
from tests.gpu.daemon_run import ClientRequest, ClientResult, DaemonRun, is_wrong
from tests.gpu.model_shapes import PUBLISHED, Shape

NUM_REQUESTS = 256
SHORTEST, LONGEST = 100, 1024
OPTIONS = ("--max-num-seqs", "256", "--max-model-len", "4096", "--max-num-batched-tokens", "8192")
PEER_LIMIT_S = 45.0


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


def measure_peer(shape: Shape, *, device: str = "cuda") -> dict[str, Any]:
    """transformers' continuous batching on the same workload, in this process. If its time is up
    before all have ended, "finished_tok_s" instead: tokens of those that have, which is less than
    what was computed; "failed" and the reason if this version cannot do it: a peer is no part of
    what is checked."""
    try:
        return _measure_peer(shape, device)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _measure_peer(shape: Shape, device: str) -> dict[str, Any]:
    """Output tokens a second by the clock on the wall; one request first, untimed."""
    prompts, num_outputs = workload(shape, NUM_REQUESTS, SHORTEST, LONGEST)
    config = transformers.AutoConfig.for_model(**shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    settings = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, eos_token_id=-1, pad_token_id=0, max_new_tokens=4096
    )
    manager = model.init_continuous_batching(generation_config=settings)
    manager.start()
    try:
        manager.add_request(prompts[0], max_new_tokens=4)
        if manager.get_result(timeout=PEER_LIMIT_S) is None:
            return {"failed": f"its first request took more than {PEER_LIMIT_S:g} s"}
        started_s = time.perf_counter()
        for prompt, number in zip(prompts, num_outputs, strict=True):
            manager.add_request(prompt, max_new_tokens=number)
        num_finished = num_tokens = 0
        while num_finished < len(prompts):
            left_s = started_s + PEER_LIMIT_S - time.perf_counter()
            result = manager.get_result(timeout=max(0.01, left_s)) if left_s > 0 else None
            if result is None:
                break
            if result.error is not None:
                return {"failed": str(result.error)[:300]}
            num_finished += 1
            num_tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - started_s
    finally:
        manager.stop(block=True, timeout=10)
    name = "output_tok_s" if num_finished == len(prompts) else "finished_tok_s"
    return {
        name: round(num_tokens / seconds, 1),
        "seconds": round(seconds, 2),
        "num_finished": num_finished,
        "num_requests": len(prompts),
    }


def _figures(name: str, figures: dict[str, Callable[[], dict[str, Any]]]) -> list[TimingGroup]:
    """Each measurement checks its own requests."""
    return [TimingGroup(name, lambda: 0.0, 0, figures=figures)]


_SMALL = f"Qwen3-0.6B, {NUM_REQUESTS} x {SHORTEST}-{LONGEST} in and out"


def daemon_timings() -> list[TimingGroup]:
    """Our own."""
    measured = partial(measure_daemon, PUBLISHED["Qwen3-0.6B"])
    return _figures("end to end", {f"daemon, {_SMALL}": measured})


def peer_timings() -> list[TimingGroup]:
    """Another engine on the same workload."""
    measured = partial(measure_peer, PUBLISHED["Qwen3-0.6B"])
    return _figures("peer", {f"transformers, {_SMALL}": measured})


def long_timings() -> list[TimingGroup]:
    """A model that fills the device, if time is left."""
    measured = partial(measure_daemon, PUBLISHED["Llama-3.1-8B"], shortest=1000, longest=1000)
    return _figures("long", {f"daemon, Llama-3.1-8B, {NUM_REQUESTS} x 1000 in and out": measured})
