"""Whole steps of published shapes: replayed decode graphs, a long prompt, and the real loop.

Weights are random. The check compares two layers of the same width with transformers: nothing here
says that the full depth is right."""

import dataclasses
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine_core.model_files.quantised_folder import read_quantisation
from engine_core.model_files.random_layers import RandomLayers
from engine_core.model_runner.gpu.graphs import GraphKey
from engine_core.model_runner.gpu.step_buckets import StepBucket
from engine_core.models.loading import load_dummy_model
from engine_core.scheduler import SchedulerOutput
from frontend.simulator.step_times import ModelShape, attention_pairs
from kernels.interface.device_steps import SamplingMode
from kernels.triton.linear import fp8
from protocol.sampling import SamplingParams
from scripts.gpu.timing import TimingGroup, Work
from tests.engine_core.model_runner.plans import Plans
from tests.gpu.checks import fp8_linear, quantised_linear
from tests.gpu.checks.whole_models import FLOAT32_ERROR, HALF_RATIO, check, check_published
from tests.gpu.engine_run import BLOCK_SIZE, EngineRun, RequestSpec, Sizes, triton_operations
from tests.gpu.model_shapes import PUBLISHED, Shape
from tests.gpu.tiny_models import HYBRIDS

BF16, FP32 = torch.bfloat16, torch.float32
CONTEXT = 1024
PREFILL = 8192
PREFIX, CHUNK = 50_000, 50
"""A turn of a chat: cached tokens, and new ones."""
NUM_LOOP_STEPS = 60
NUM_LISTED_KERNELS = 24
MOST_SEQS = 256
_FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128] * 2,
}
_INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}
BY_TORCH = "FP8 blocks by torch"
FORMATS: dict[str, tuple[dict[str, Any], float]] = {
    "FP8": ({"quant_method": "fbgemm_fp8"}, 1.0),
    "FP8 blocks": (_FP8_BLOCKS, 1.0),
    BY_TORCH: (_FP8_BLOCKS, 1.0),
    "INT4": (_INT4, 0.5 + 2 / 128),
}
"""Of weights: a quantization_config, and the bytes of an element with its share of a scale."""


class ReadyEngine:
    """An engine with random weights, and plans by hand for exactly one step. `dtype` is that of
    weights, activations and the cache; of weights the one of `FORMATS` that is named. `options`:
    of `triton_operations`."""

    def __init__(
        self,
        shape: Shape,
        sizes: Sizes,
        *,
        dtype: torch.dtype,
        device: str,
        weights: str = "",
        **options: Any,
    ) -> None:
        draw, types = None, frozenset[str]()
        if weights:
            fields, _ = FORMATS[weights]
            how = read_quantisation({"quantization_config": fields}, Path(weights))
            assert how is not None
            draw, types = RandomLayers(fields, how, Path(weights)).draw, frozenset({how.type_name})
        ops = triton_operations(device, quantised_types=types, **options)
        fp8.BLOCKS_BY_LIBRARY = weights == BY_TORCH
        if fp8.BLOCKS_BY_LIBRARY and not fp8.library_multiplies_blocks(ops.device):
            raise ValueError(f"torch multiplies no blocks of float8 on {ops.device}")
        model = load_dummy_model(
            shape, dtype=dtype, ops=ops, max_model_len=sizes.max_model_len, draw_quantised=draw
        )
        self.engine = EngineRun(model, ops, sizes, dtype=dtype)
        self.vocab_size = model.spec.vocab_size
        for pool in self.engine.runner.storage.pools:  # zeros run faster than real data
            pool.device_blocks.view(dtype).normal_()
        self._present: list[str] = []
        self._num_steps = 0

    def decode(self, batch: int, context: int) -> Callable[[], object]:
        """What replays a decode step of `batch` sequences of `context` tokens on the current
        stream, again and again the same one."""
        runner = self.engine.runner
        runner.execute(self._plan([(context, context - 1)] * batch))
        return runner.graphs.replay_of(GraphKey(StepBucket(batch, batch), SamplingMode.PLAIN))

    def prefill(self, num_tokens: int, prefix: int = 0) -> Callable[[], object]:
        """What computes a prompt behind what is cached of it in one step, and waits for it."""
        plan = self._plan([(prefix + num_tokens, prefix)])
        return lambda: self.engine.runner.execute(plan)

    def time_decodes(self, batch: int, context: int, num_steps: int) -> dict[str, float]:
        """The real scheduler with a step in flight, by the clock on the wall: milliseconds a step,
        and how many of them the host is at work (planning, launching, taking in)."""
        runner, engine = self.engine.runner, self.engine
        runner.execute(self._plan([]))
        names = [f"timed {at}" for at in range(batch)]
        for name in names:
            prompt = torch.randint(self.vocab_size, (context,)).tolist()
            engine.add(RequestSpec(name, prompt, num_steps + batch, temperature=1.0))
        while not all(engine.answers[name].tokens for name in names):
            engine.step()
        for _ in range(3):  # the first records the graph
            engine.step()
        before, engine.host_s = sum(len(engine.answers[name].tokens) for name in names), 0.0
        started_s = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        seconds = time.perf_counter() - started_s
        host_s = engine.host_s
        num_tokens = sum(len(engine.answers[name].tokens) for name in names) - before
        engine.abort(names)
        return {
            "step_ms": round(1e3 * seconds / num_steps, 3),
            "host_ms": round(1e3 * host_s / num_steps, 3),
            "output_tok_s": round(num_tokens / seconds, 1),
        }

    def _plan(self, sequences: list[tuple[int, int]]) -> SchedulerOutput:
        """New sequences of (tokens, of which computed), instead of those that were there."""
        config = self.engine.runner.config
        plans = Plans(
            num_groups=config.num_groups,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
        )
        # in order, as an engine that has just begun gives them
        ids = config.block_ids
        free = [ids.stack(pool) for pool in range(len(ids.sizes))]
        plans.free_rows.sort(reverse=True)
        self._num_steps += 1
        counts: dict[str, int] = {}
        for row, (length, computed) in enumerate(sequences):
            name = f"by hand {self._num_steps} {row}"
            prompt = torch.randint(self.vocab_size, (length,)).tolist()
            params = SamplingParams(max_tokens=1, temperature=1.0, seed=row)
            width, tables = -(-length // BLOCK_SIZE), list[list[int]]()
            for spec in config.layout.group_specs:
                # of states the one that the step starts from, and two at its end
                kept = {max(0, computed - 1) // BLOCK_SIZE, width - 2, width - 1}
                wanted = kept if spec.is_sparse else range(width)
                pool = free[spec.pool]
                tables.append([pool.pop() if at in wanted else 0 for at in range(width)])
            plans.add(name, prompt, params, computed=computed, tables=tables)
            counts[name] = length - computed
        finished, self._present = self._present, list(counts)
        return dataclasses.replace(
            plans.plan(counts), step_id=self._num_steps, finished_req_ids=finished
        )


_ON_DEVICE: dict[str, ReadyEngine] = {}


def _engine(
    name: str,
    *,
    shape: Shape | None = None,
    most_seqs: int = MOST_SEQS,
    most_context: int = CONTEXT,
    most_prefill: int = PREFILL,
    most_prefix: int = PREFIX,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    weights: str = "",
    **options: Any,
) -> ReadyEngine:
    """Of that published model, with room for every step that is timed on it; another one is taken
    off the device first."""
    if (key := f"{weights} {name} {options}") not in _ON_DEVICE:
        _ON_DEVICE.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        # tokens that a sequence of the loop may be given: the first one waits for all prompts
        length = most_context + NUM_LOOP_STEPS + most_seqs
        longest = max(most_prefill, length, most_prefix + CHUNK + 1)
        wanted = shape or PUBLISHED[name]
        num_blocks = max(most_seqs * -(-length // BLOCK_SIZE), -(-longest // BLOCK_SIZE)) + 1
        sizes = Sizes(
            max_num_seqs=most_seqs,
            max_model_len=longest,
            max_num_batched_tokens=max(most_prefill, most_seqs),
            # a decode holds at most two states, a prompt four
            num_blocks=(num_blocks, 2 * most_seqs + 160) if _num_states(wanted) else num_blocks,
        )
        options |= {"dtype": dtype, "device": device, "weights": weights}
        _ON_DEVICE[key] = ReadyEngine(wanted, sizes, **options)
    return _ON_DEVICE[key]


def time_decode(name: str, batch: int, context: int = CONTEXT, **options: Any) -> Work:
    """A decode step: its graph, replayed. `options`: see `_engine`."""
    shape = options.get("shape") or PUBLISHED[name]
    call = _engine(name, **options).decode(batch, context)
    return step_work(shape, call, batch, context, 1, options.get("weights", ""))


def time_prefill(name: str, num_tokens: int = PREFILL, **options: Any) -> Work:
    """One prompt in one step, from its plan to its token on the host."""
    shape = options.get("shape") or PUBLISHED[name]
    call, weights = _engine(name, **options).prefill(num_tokens), options.get("weights", "")
    return step_work(shape, call, 1, num_tokens, num_tokens, weights)


def time_chunk(name: str, num_tokens: int = CHUNK, prefix: int = PREFIX, **options: Any) -> Work:
    """A prompt's chunk behind tokens that are cached, as `time_prefill`."""
    shape = options.get("shape") or PUBLISHED[name]
    call = _engine(name, **options).prefill(num_tokens, prefix)
    return step_work(shape, call, 1, prefix + num_tokens, num_tokens)


def measure_loop(
    name: str, batch: int, context: int = CONTEXT, num_steps: int = NUM_LOOP_STEPS, **options: Any
) -> dict[str, float]:
    """See `ReadyEngine.time_decodes`."""
    return _engine(name, **options).time_decodes(batch, context, num_steps)


def profile_decode(name: str, batch: int, context: int = CONTEXT, **options: Any) -> dict[str, Any]:
    """See `_profile`."""
    return _profile(_engine(name, **options).decode(batch, context), 20)


def profile_prefill(name: str, num_tokens: int = PREFILL, **options: Any) -> dict[str, Any]:
    """See `_profile`."""
    return _profile(_engine(name, **options).prefill(num_tokens), 3)


def _profile(call: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """Microseconds a step takes, and those of its kernels: how often each is launched in a step and
    how long all of its launches take, the longest first. Dependent launches overlap."""

    def run() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(num_steps):
            call()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / num_steps

    run()
    step_us = run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    events = [each for each in profiler.key_averages() if each.device_type == DeviceType.CUDA]
    events.sort(key=lambda each: -each.self_device_time_total)
    times = [round(each.self_device_time_total / num_steps, 2) for each in events]
    counts = [each.count / num_steps for each in events]
    named = zip([each.key[:80] for each in events], counts, times, strict=True)
    return {
        "step_us": round(step_us, 1),
        "kernels_us": round(sum(times), 1),
        "kernels": {name: [count, us] for name, count, us in [*named][:NUM_LISTED_KERNELS]},
    }


def _num_states(shape: Shape) -> int:
    """Layers that keep a state."""
    kinds: list[str] = shape.get("layer_types") or []
    return kinds.count("linear_attention")


def step_work(
    shape: Shape,
    call: Callable[[], object],
    batch: int,
    context: int,
    num_scheduled: int,
    weights: str = "",
) -> Work:
    """A step of `batch` sequences of `context` tokens, the last `num_scheduled` of them computed in
    it. It reads the weights once and every sequence's keys, values and states; logits of last
    tokens only. The floor of `weights` (of `FORMATS`) is that of bf16 products, which float8 may
    pass."""
    num_states = _num_states(shape)
    model = ModelShape(
        shape["model_type"],
        num_layers=shape["num_hidden_layers"] - num_states,
        hidden=shape["hidden_size"],
        num_query_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        feed_forward=shape["intermediate_size"],
        vocabulary=shape["vocab_size"],
    )
    num_layer_weights, state_bytes, state_flops = model.num_layer_weights, 0, 0
    attended = model.num_layers * model.num_query_heads * model.head_dim
    if num_states:  # gated delta nets; attention has a gate as wide as its queries
        heads, key_size = shape["linear_num_value_heads"], shape["linear_key_head_dim"]
        keys = shape["linear_num_key_heads"] * key_size
        values = heads * shape["linear_value_head_dim"]
        width = 2 * keys + 3 * values + 2 * heads + 3 * model.feed_forward
        num_layer_weights += model.hidden * (attended + num_states * width)
        record = 4 * (values * key_size + BLOCK_SIZE * (keys + values + heads))
        # a prompt leaves two behind; each token has two products with the state, and adds one
        state_bytes = num_states * batch * record * (1 if num_scheduled == 1 else 3)
        state_flops = num_states * batch * num_scheduled * 6 * values * key_size
    products = batch * (num_scheduled * num_layer_weights + model.num_output_weights)
    pairs = batch * attention_pairs(context - num_scheduled, num_scheduled)
    return Work(
        call=call,
        num_bytes=num_layer_weights * (FORMATS[weights][1] if weights else model.bytes_per_weight)
        + model.num_output_weights * model.bytes_per_weight
        + batch * context * model.cache_bytes_per_token
        + state_bytes,
        num_flops=2.0 * products + 4.0 * pairs * attended + state_flops,
        fits_graph=False,
    )


def _group(
    name: str, batches: tuple[int, ...], prefill: bool = False, loops: tuple[int, ...] = ()
) -> TimingGroup:
    timings: dict[str, Callable[[], Work]] = {
        f"decode step {name} {batch} x {CONTEXT}": partial(time_decode, name, batch)
        for batch in batches
    }
    if prefill:
        timings[f"prefill step {name} {PREFILL}"] = partial(time_prefill, name)
        timings[f"prefill step {name} {CHUNK} after {PREFIX}"] = partial(time_chunk, name)
    figures: dict[str, Callable[[], dict[str, Any]]] = {
        f"loop {name} {batch} x {CONTEXT}": partial(measure_loop, name, batch) for batch in loops
    }
    for batch in batches:
        figures[f"profile {name} {batch} x {CONTEXT}"] = partial(profile_decode, name, batch)
    if prefill:
        figures[f"profile {name} {PREFILL}"] = partial(profile_prefill, name)
    check = partial(check_published, PUBLISHED[name], device="cuda")
    return TimingGroup(f"{name}, 2 layers", check, HALF_RATIO, timings, figures)


def step_timings() -> list[TimingGroup]:
    return [
        _group("Llama-3.1-8B", (1, 64, 256), prefill=True, loops=(64,)),
        _group("Qwen3-8B", (1,)),
        _group("Qwen3-0.6B", (1, 256), loops=(1, 256)),
    ]


def quantised_timings() -> list[TimingGroup]:
    """Llama-3.1-8B with each of `FORMATS`; the format's product is what is checked."""
    name, groups = "Llama-3.1-8B", list[TimingGroup]()
    checks = {
        "FP8": (partial(fp8_linear.check, 300, 4096, 3072), fp8_linear.ROUNDING),
        "FP8 blocks": (partial(fp8_linear.check_blocks, 300, 4096, 3072), fp8_linear.ROUNDING),
        BY_TORCH: (
            partial(fp8_linear.check_blocks, 300, 4096, 3072, by_library=True),
            fp8_linear.ROUNDING,
        ),
        "INT4": (
            partial(quantised_linear.check, 63, 3072, 4096, num_bits=4),
            quantised_linear.ROUNDING,
        ),
    }
    for weights, (product, tolerance) in checks.items():
        timings: dict[str, Callable[[], Work]] = {
            f"decode step {weights} {name} {batch} x {CONTEXT}": partial(
                time_decode, name, batch, weights=weights
            )
            for batch in (1, 64, 128, 256)
        }
        timings[f"prefill step {weights} {name} {PREFILL}"] = partial(
            time_prefill, name, weights=weights
        )
        figures = {
            f"profile {weights} {name} 1 x {CONTEXT}": partial(
                profile_decode, name, 1, weights=weights
            )
        }
        checked = partial(product, device="cuda")
        groups.append(TimingGroup(f"{weights} {name}", checked, tolerance, timings, figures))
    return groups


def hybrid_timings() -> list[TimingGroup]:
    """Models of which some layers keep a state: whether tiny ones are right, and a step's time."""
    errors: dict[str, Callable[[], dict[str, float]]] = {
        f"tiny {name} {_name(dtype)} {'graphs' if use_graphs else 'launched'}": partial(
            measure_error, name, dtype, use_graphs=use_graphs
        )
        for name in HYBRIDS
        for dtype, use_graphs in ((FP32, True), (FP32, False), (BF16, True))
    }
    tiny = TimingGroup("hybrids, tiny", lambda: 0.0, 0.0, {}, errors)
    return [tiny, _group("Qwen3.5-9B", (1, 64, 256), prefill=True, loops=(64,))]


def measure_error(
    name: str, dtype: torch.dtype, *, device: str = "cuda", **options: Any
) -> dict[str, float]:
    """Of a tiny model, see `tests.gpu.checks.whole_models.compare`. Raises ValueError: more than
    its limit."""
    error = check(name, dtype, device=device, **options)
    limit = FLOAT32_ERROR if dtype is FP32 else HALF_RATIO
    if not error <= limit:
        raise ValueError(f"the error is {error:g}, the limit {limit:g}")
    return {"error" if dtype is FP32 else "error_ratio": error}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
