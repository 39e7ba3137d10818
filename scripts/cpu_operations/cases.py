"""Single operations at SmolLM2-135M's shapes, on any CPU backend.

Owns the tensors of each case. Must not know how time is taken.
"""

from collections.abc import Callable

import numpy as np
import torch

from kernels.interface.operations import (
    AttentionParams,
    AttentionSpec,
    RotaryParams,
    SamplingLimits,
)
from kernels.torch.operations import TorchOperations

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
    # as many caches as layers, taken in turn: one alone would stay in the processor's cache
    shape = (num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    num_layers = max(1, min(30, 400_000_000 // (2 * 4 * int(np.prod(shape)))))
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_layers)]
    q = torch.randn(num_tokens, HEADS, HEAD_SIZE, generator=generator)
    turn = iter(int(i) for i in np.resize(np.arange(num_layers), 10**6))

    def attend() -> torch.Tensor:
        k_cache, v_cache = caches[next(turn)]
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
    x, residual, weight = torch.zeros(num_tokens, WIDTH), torch.randn(num_tokens, WIDTH), None
    weight = torch.zeros(WIDTH)
    return lambda: ops.add_rms_norm(x, residual, weight, 1e-5)


def silu_case(ops: TorchOperations, num_tokens: int) -> Case:
    """Gated activation."""
    both = torch.randn(num_tokens, 2 * FEED_FORWARD)
    return lambda: ops.silu_and_mul(both)


def sampling_case(ops: TorchOperations, num_rows: int, spread: float, truncated: bool) -> Case:
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
    "attention, 1 decode at 192": lambda ops: attention_case(ops, [(1, 192)]),
    "attention, 1 decode at 2000": lambda ops: attention_case(ops, [(1, 2000)]),
    "attention, 32 decodes at 96-480": lambda ops: attention_case(
        ops, [(1, 96 + 12 * n) for n in range(32)]
    ),
    "attention, 64 decodes at 300": lambda ops: attention_case(ops, [(1, 300)] * 64),
    "attention, prompt of 64": lambda ops: attention_case(ops, [(64, 64)]),
    "attention, prompt of 512": lambda ops: attention_case(ops, [(512, 512)]),
    "attention, 512 at 2048": lambda ops: attention_case(ops, [(512, 2048)]),
    "attention, 16 decodes and 200": lambda ops: attention_case(
        ops, [(1, 300)] * 16 + [(200, 200)]
    ),
    "rotary and cache, 1": lambda ops: rotary_case(ops, 1),
    "rotary and cache, 64": lambda ops: rotary_case(ops, 64),
    "rotary and cache, 512": lambda ops: rotary_case(ops, 512),
    "add and norm, 1": lambda ops: norm_case(ops, 1),
    "add and norm, 64": lambda ops: norm_case(ops, 64),
    "add and norm, 512": lambda ops: norm_case(ops, 512),
    "silu and mul, 1": lambda ops: silu_case(ops, 1),
    "silu and mul, 64": lambda ops: silu_case(ops, 64),
    "silu and mul, 512": lambda ops: silu_case(ops, 512),
    "sample from all, 1 flat row": lambda ops: sampling_case(ops, 1, 1.0, False),
    "sample from all, 32 flat rows": lambda ops: sampling_case(ops, 32, 1.0, False),
    "sample from all, 32 steep rows": lambda ops: sampling_case(ops, 32, 5.0, False),
    "sample top_k 50 top_p 0.9, 32 rows": lambda ops: sampling_case(ops, 32, 3.0, True),
}
