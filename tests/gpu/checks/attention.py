"""Paged attention: decodes, prefills, both in one step, and the options of models.

A check goes row by row: the difference over the largest element of that head's result, so that a
long context, whose results are small, is judged like a short one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from kernels.triton.attention.lists import SHORTEST_SPLIT
from kernels.triton.attention.work import AttentionVariant
from tests.gpu.checks.errors import num_different, poison, row_error
from tests.gpu.checks.paged_step import Heads, PagedStep, Request

ROUNDING = 1e-2
"""Probabilities and results are rounded to bf16 (2^-9 each), on top of float32 sums."""
PROGRAMS_A_MULTIPROCESSOR = 3

LLAMA = Heads(num_query_heads=32, num_kv_heads=8, head_size=128)
QWEN_SMALL = Heads(num_query_heads=16, num_kv_heads=8, head_size=128)
SMOL = Heads(num_query_heads=9, num_kv_heads=3, head_size=64)
QWEN25 = Heads(num_query_heads=14, num_kv_heads=2, head_size=64, block_size=64)
PHI = Heads(num_query_heads=32, num_kv_heads=32, head_size=80)
GEMMA = Heads(num_query_heads=8, num_kv_heads=4, head_size=256, sliding_window=512)
GPT_OSS = Heads(num_query_heads=64, num_kv_heads=8, head_size=64, sliding_window=128)

DECODES = [(1, 1), (63, 1), (64, 1), (65, 1), (257, 1), (1000, 1), (4097, 1), (20000, 1)]
SPECULATIVE = [(5, 5), (63, 2), (300, 5), (1025, 1), (4000, 5)]
PREFILLS = [(2, 2), (63, 63), (129, 129), (700, 700), (1500, 333), (65, 64), (9000, 40)]


def num_programs(a_multiprocessor: int | None = None) -> int:
    """Persistent programs of the decode kernel on this device."""
    if not torch.cuda.is_available():
        return 5
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return (a_multiprocessor or PROGRAMS_A_MULTIPROCESSOR) * multiprocessors


def with_cache(heads: Heads, dtype: torch.dtype) -> Heads:
    """The same with a cache of that dtype."""
    return dataclasses.replace(heads, kv_dtype=dtype)


def make_step(
    heads: Heads,
    decodes: Sequence[Request],
    prefills: Sequence[Request],
    *,
    device: str,
    a_multiprocessor: int | None = None,
    shortest_split: int = SHORTEST_SPLIT,
    variant: AttentionVariant = AttentionVariant(),  # noqa: B008
) -> PagedStep:
    """With as many programs as fill the device, or so many for each of its multiprocessors."""
    programs = num_programs(a_multiprocessor)
    return PagedStep(
        heads,
        decodes,
        prefills,
        device=device,
        num_programs=programs,
        shortest_split=shortest_split,
        variant=variant,
    )


def check(
    heads: Heads,
    decodes: Sequence[Request],
    prefills: Sequence[Request],
    *,
    device: str,
    with_sinks: bool = False,
    with_alibi: bool = False,
    shortest_split: int = SHORTEST_SPLIT,
    variant: AttentionVariant = AttentionVariant(),  # noqa: B008
    **options: Any,
) -> float:
    """The kernels against the specification, on a step of its own."""
    step = make_step(
        heads, decodes, prefills, device=device, shortest_split=shortest_split, variant=variant
    )
    if with_sinks:
        options["sinks_H"] = torch.randn(heads.num_query_heads, device=device)
    if with_alibi:
        options["alibi_slopes_H"] = torch.rand(heads.num_query_heads, device=device) / 16
    out = step.attend(poison(torch.empty_like(step.q_THD)), **options)
    return row_error(out.cpu(), step.reference(**options))


def check_alone_and_in_a_crowd(
    heads: Heads, decodes: Sequence[Request], prefills: Sequence[Request], *, device: str
) -> float:
    """How many numbers differ, bit for bit, when each request of a step runs alone."""
    longest = max(length for length, _ in [*decodes, *prefills])
    step = PagedStep(
        heads,
        decodes,
        prefills,
        device=device,
        num_programs=num_programs(),
        max_seq_len=longest,
    )
    out = step.attend(poison(torch.empty_like(step.q_THD)))
    different, start = 0.0, 0
    for row, (length, queries) in enumerate(step.requests):
        is_decode = row < len(decodes)
        request = [(length, queries)]
        alone = PagedStep(
            heads,
            request if is_decode else [],
            [] if is_decode else request,
            device=device,
            num_programs=1,
            max_seq_len=longest,  # a property of the engine, not of the request
        )
        width = -(-length // heads.block_size)
        blocks = step.metadata.block_table_RM[row, :width].long()
        alone.kv_B2KSD[alone.metadata.block_table_RM[0, :width].long()] = step.kv_B2KSD[blocks]
        alone.q_THD.copy_(step.q_THD[start : start + queries])
        result = alone.attend(poison(torch.empty_like(alone.q_THD)))
        different += num_different(result, out[start : start + queries])
        start += queries
    return different
