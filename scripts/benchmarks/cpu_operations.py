"""Native CPU operations and dense products beside torch's, alone, at SmolLM2-135M's shapes."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from cyclopts import Parameter

from kernels.cpu.gguf_blocks import pack_gguf
from kernels.cpu.library import ISA_NAMES, NativeLibrary, load_library
from kernels.cpu.linear import NativeLinear
from kernels.cpu.operations import CpuOperations
from kernels.cpu.weights import (
    PackedLinear,
    pack_bfloat16,
    pack_float,
    quantise_int4,
    quantise_int8,
)
from kernels.interface.operations import AttentionParams, AttentionSpec, RotaryParams
from kernels.interface.sampling import SamplingLimits
from kernels.torch import linear as torch_linear
from kernels.torch.operations import TorchOperations
from scripts.benchmarks import Json, Rows, report
from scripts.benchmarks.best_times import Threads, best_times, set_threads
from scripts.load.report import log

HEADS, KV_HEADS, HEAD_SIZE, WIDTH, FEED_FORWARD, VOCAB = 9, 3, 64, 576, 1536, 49_152
BLOCK_SIZE = 16
Case = Callable[[], object]


def attention_case(ops: TorchOperations, requests: list[tuple[int, int]]) -> Case:
    """Attention of requests of (queries, sequence length) at SmolLM2-135M's heads."""
    generator = torch.Generator().manual_seed(0)
    width = max(-(-length // BLOCK_SIZE) for _, length in requests)
    num_blocks = len(requests) * width + 1
    starts = torch.tensor([0, *(queries for queries, _ in requests)]).cumsum(0).int()
    num_tokens = int(starts[-1])
    planner = ops.make_attention_planner(
        AttentionSpec(
            num_query_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            block_size=BLOCK_SIZE,
            sliding_window=None,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            dtype=torch.float32,
            kv_dtype=torch.float32,
        )
    )
    metadata = planner.plan(
        query_start_loc_R1=starts,
        seq_lens_R=torch.tensor([length for _, length in requests]).int(),
        block_table_RM=(torch.randperm(num_blocks - 1, generator=generator) + 1)
        .view(-1, width)
        .int(),
        slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
        num_decodes=0,
        num_decode_tokens=0,
    )
    # as many caches as layers: one alone would stay in the processor's cache
    shape = (num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    num_layers = max(1, min(30, 400_000_000 // (2 * 4 * int(np.prod(shape)))))
    caches = [ops.allocate_kv_cache(*shape, torch.float32) for _ in range(num_layers)]
    for each in itertools.chain.from_iterable(caches):
        each.normal_()
    q = torch.randn(num_tokens, HEADS, HEAD_SIZE, generator=generator)
    layers = itertools.cycle(caches)

    def attend() -> torch.Tensor:
        k_cache, v_cache = next(layers)
        return ops.paged_attention(q, k_cache, v_cache, metadata, AttentionParams(scale=0.125))

    return attend


def rotary_case(ops: TorchOperations, num_tokens: int) -> Case:
    cache = ops.allocate_kv_cache(64, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, torch.float32)
    qkv = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    table = torch.randn(2048, HEAD_SIZE)
    positions, slots = torch.arange(num_tokens), torch.randperm(1024)[:num_tokens]
    return lambda: ops.rotary_and_cache(
        qkv,
        positions,
        slots,
        cache,
        RotaryParams(num_query_heads=HEADS, head_size=HEAD_SIZE, cos_sin_PD=table),
    )


def norm_case(ops: TorchOperations, num_tokens: int) -> Case:
    """Sum and norm; the sum is kept from growing by a weight of zeros."""
    x, residual = torch.zeros(num_tokens, WIDTH), torch.randn(num_tokens, WIDTH)
    weight = torch.zeros(WIDTH)
    return lambda: ops.add_rms_norm(x, residual, weight, 1e-5)


def silu_case(ops: TorchOperations, num_tokens: int) -> Case:
    both = torch.randn(num_tokens, 2 * FEED_FORWARD)
    return lambda: ops.silu_and_mul(both)


def sampling_case(
    ops: TorchOperations, num_rows: int, spread: float, truncated: bool = False
) -> Case:
    """Choosing tokens from a vocabulary of 49,152."""
    logits = torch.randn(num_rows, VOCAB) * spread
    seeds, positions = torch.arange(num_rows), torch.arange(num_rows)
    if not truncated:
        return lambda: ops.sample(logits, seeds, positions)
    limits = {
        "top_k_R": torch.full((num_rows,), 50),
        "top_p_R": torch.full((num_rows,), 0.9),
        "min_p_R": torch.zeros(num_rows),
    }
    return lambda: ops.sample(logits, seeds, positions, SamplingLimits(**limits))


CASES: dict[str, Callable[[TorchOperations], Case]] = {
    **{
        f"attention, {name}": partial(attention_case, requests=requests)
        for name, requests in {
            "1 decode at 192": [(1, 192)],
            "1 decode at 2000": [(1, 2000)],
            "32 decodes at 96-480": [(1, 96 + 12 * n) for n in range(32)],
            "64 decodes at 300": [(1, 300)] * 64,
            "prompt of 64": [(64, 64)],
            "prompt of 512": [(512, 512)],
            "512 at 2048": [(512, 2048)],
            "16 decodes and 200": [(1, 300)] * 16 + [(200, 200)],
        }.items()
    },
    **{
        f"{name}, {num_tokens}": partial(make, num_tokens=num_tokens)
        for name, make in {
            "rotary and cache": rotary_case,
            "add and norm": norm_case,
            "silu and mul": silu_case,
        }.items()
        for num_tokens in (1, 64, 512)
    },
    "sample from all, 1 flat row": partial(sampling_case, num_rows=1, spread=1.0),
    "sample from all, 32 flat rows": partial(sampling_case, num_rows=32, spread=1.0),
    "sample from all, 32 steep rows": partial(sampling_case, num_rows=32, spread=5.0),
    "sample top_k 50 top_p 0.9, 32 rows": partial(
        sampling_case, num_rows=32, spread=3.0, truncated=True
    ),
}


def cpu_operations(
    *,
    only: Annotated[str, Parameter(help="Those whose name contains this.")] = "",
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Backends alternate in one process; the best of several rounds is given. With --threads 1 the
    time is that of the one core's work, which other programs disturb little."""
    set_threads(threads)
    native, reference = CpuOperations(load_library()), TorchOperations()
    results = {}
    log(f"{'':38}{'torch us':>10}{'native us':>11}{'times':>7}   {native.name}")
    for name, make in CASES.items():
        if only in name:
            times = best_times([make(reference), make(native)], 4, 0.08)
            torch_us, native_us = (seconds * 1e6 for seconds in times)
            results[name] = {"torch_us": torch_us, "native_us": native_us}
            log(f"{name:38}{torch_us:10.1f}{native_us:11.1f}{torch_us / native_us:7.1f}")
    report(results, json)


# ---------------------------------------------------------------------- dense products


SHAPES = {
    "qkv": (960, 576),
    "attention_out": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "logits": (49152, 576),
}
NUM_LAYERS = 30
# inputs and bytes of a block, and where its float16 scales lie
GGUF_BLOCKS = {
    "Q8_0": (32, 34, (0,)),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q4_K": (256, 144, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
OWN_KINDS = {
    "float32": pack_float,
    "bfloat16": pack_bfloat16,
    "int8": quantise_int8,
    "int4": quantise_int4,
}
Kind = Literal["float32", "bfloat16", "int8", "int4", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
ALL_KINDS: tuple[Kind, ...] = get_args(Kind)
Shape = tuple[int, int]
Product = Callable[[torch.Tensor], torch.Tensor]


def gguf_weight(
    library: NativeLibrary, type_name: str, num_outputs: int, num_inputs: int
) -> PackedLinear:
    """Random codes with scales near 1 / 128."""
    inputs, num_bytes, halves = GGUF_BLOCKS[type_name]
    shape = (num_outputs * num_inputs // inputs, num_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    for at in halves:
        blocks[:, at + 1] = 0x20
    return pack_gguf(library, blocks, type_name, num_outputs, num_inputs)


def products(
    library: NativeLibrary, shape: Shape, kinds: Sequence[str]
) -> dict[str, tuple[Product, int]]:
    """torch's product and each of `kinds` that exists for the shape, with its weight's bytes."""
    num_outputs, num_inputs = shape
    weight_NE = torch.randn(shape)
    linear = NativeLinear(library)
    prepared = torch_linear.prepare_linear(weight_NE, None)
    made: dict[str, tuple[Product, int]] = {
        "torch": (lambda x: torch_linear.linear(x, prepared), weight_NE.numel() * 4)
    }
    for kind in kinds:
        if kind in OWN_KINDS:
            weight = OWN_KINDS[kind](library, weight_NE)
        elif num_inputs % GGUF_BLOCKS[kind][0]:
            continue
        else:
            weight = gguf_weight(library, kind, num_outputs, num_inputs)
        made[kind] = (partial(linear, weight=weight), weight.num_bytes)
    return made


_STEP = (
    "All products of one step of the model, 30 layers and the logits, with weights that no cache "
    "holds, in place of single shapes."
)


def cpu_kernels(
    *,
    rows: Rows = (1, 4, 16, 64, 256, 512),
    rounds: int = 10,
    kinds: Annotated[
        tuple[Kind, ...], Parameter(consume_multiple=True, negative="", help="Of weights.")
    ] = ALL_KINDS,
    isa: Annotated[str | None, Parameter(help="Not the machine's best, but this one.")] = None,
    step: Annotated[bool, Parameter(help=_STEP)] = False,
    json: Json = None,
) -> None:
    """With ENGINE_CORE_NATIVE_THREADS=1 the clock is the thread's own, which other programs disturb
    less."""
    if isa is not None and isa not in ISA_NAMES:
        raise ValueError(f"--isa is {isa}, it must be one of {', '.join(ISA_NAMES)}")
    library = load_library()
    torch.set_num_threads(library.num_threads)
    cases: dict[str, list[Shape]] = {f"{n} {i} -> {o}": [(o, i)] for n, (o, i) in SHAPES.items()}
    if step:
        layer = [shape for name, shape in SHAPES.items() if name != "logits"]
        cases = {"all products of a step": [*layer * NUM_LAYERS, SHAPES["logits"]]}
    with library.forced_isa(isa or library.machine_isa):
        reports: list[dict[str, Any]] = []
        for name, shapes in cases.items():
            layers = [products(library, shape, kinds) for shape in shapes]
            common = [kind for kind in layers[0] if all(kind in made for made in layers)]
            for num_rows in rows:
                inputs = {width: torch.randn(num_rows, width) for _, width in shapes}
                xs = [inputs[width] for _, width in shapes]
                calls = [partial(_run, [made[kind][0] for made in layers], xs) for kind in common]
                times = best_times(calls, rounds, 0.005)
                flops = 2 * num_rows * sum(num_outputs * width for num_outputs, width in shapes)
                log(f"{name}, {num_rows} rows")
                results = {}
                for kind, seconds in zip(common, times, strict=True):
                    size = sum(made[kind][1] for made in layers)
                    results[kind] = figures = {
                        "us": round(seconds * 1e6, 1),
                        "gflops": round(flops / seconds / 1e9, 1),
                        "gb_per_s": round(size / seconds / 1e9, 1),
                        "torch_time_ratio": round(times[0] / seconds, 2),
                    }
                    log(
                        f"  {kind:8} {figures['us']:10.1f} us {figures['gflops']:8.1f} GFLOP/s "
                        f"{figures['gb_per_s']:6.1f} GB/s   x {figures['torch_time_ratio']:5.2f}"
                    )
                reports.append({"shape": name, "rows": num_rows, "kinds": results})
        document = {"threads": library.num_threads, "isa": library.isa, "reports": reports}
    report(document, json)


def _run(products: Sequence[Product], xs: Sequence[torch.Tensor]) -> None:
    for product, x in zip(products, xs, strict=True):
        product(x)
