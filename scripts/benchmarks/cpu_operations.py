"""Native CPU operations beside torch's at SmolLM2-135M's shapes, as single calls."""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter

from kernels.cpu.library import load_library
from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import (
    AttentionParams,
    AttentionSpec,
    RotaryParams,
    SamplingLimits,
)
from kernels.torch.operations import TorchOperations
from scripts.benchmarks import Json, report
from scripts.benchmarks.best_times import Threads, best_times, set_threads

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
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_layers)]
    q = torch.randn(num_tokens, HEADS, HEAD_SIZE, generator=generator)
    layers = itertools.cycle(caches)

    def attend() -> torch.Tensor:
        k_cache, v_cache = next(layers)
        return ops.paged_attention(q, k_cache, v_cache, metadata, AttentionParams(scale=0.125))

    return attend


def rotary_case(ops: TorchOperations, num_tokens: int) -> Case:
    """Rotation and cache write."""
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
    """Gated activation."""
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
    """Native CPU operations beside torch's, each alone, at SmolLM2-135M's shapes.

    Backends alternate in one process; the best of several rounds is given. With --threads 1 the
    time is that of the one core's work, which other programs disturb little.
    """
    set_threads(threads)
    native, reference = CpuOperations(load_library()), TorchOperations()
    results = {}
    print(f"{'':38}{'torch us':>10}{'native us':>11}{'times':>7}   {native.name}", file=sys.stderr)
    for name, make in CASES.items():
        if only in name:
            times = best_times([make(reference), make(native)], 4, 0.08)
            torch_us, native_us = (seconds * 1e6 for seconds in times)
            results[name] = {"torch_us": torch_us, "native_us": native_us}
            line = f"{name:38}{torch_us:10.1f}{native_us:11.1f}{torch_us / native_us:7.1f}"
            print(line, file=sys.stderr)
    report(results, json)
