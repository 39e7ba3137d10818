"""Paged attention: decodes, prefills, both in one step, and the options of models.

A check goes row by row: the difference over the largest element of that head's result, so that a
long context, whose results are small, is judged like a short one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from kernels.triton.attention_reduce import merge_states
from scripts.gpu.comparison import num_different, poison, row_error, worst
from scripts.gpu.frame import Check, Group, Timing, Work
from scripts.gpu.paged_step import Heads, PagedStep, Request

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
FP8 = torch.float8_e4m3fn

DECODES = [(1, 1), (63, 1), (64, 1), (65, 1), (257, 1), (1000, 1), (4097, 1), (20000, 1)]
SPECULATIVE = [(5, 5), (63, 2), (300, 5), (1025, 1), (4000, 5)]
PREFILLS = [(1, 1), (63, 63), (129, 129), (700, 700), (1500, 333), (65, 64)]


def num_programs() -> int:
    """Persistent programs of the decode kernel on this device."""
    if not torch.cuda.is_available():
        return 5
    return PROGRAMS_A_MULTIPROCESSOR * torch.cuda.get_device_properties(0).multi_processor_count


def check(
    heads: Heads,
    decodes: Sequence[Request],
    prefills: Sequence[Request],
    *,
    device: str = "cuda",
    with_sinks: bool = False,
    with_alibi: bool = False,
    **options: Any,
) -> float:
    """The kernels against the specification, on a step of its own."""
    step = PagedStep(heads, decodes, prefills, device=device, num_programs=num_programs())
    if with_sinks:
        options["sinks_H"] = torch.randn(heads.num_query_heads, device=device)
    if with_alibi:
        options["alibi_slopes_H"] = torch.rand(heads.num_query_heads, device=device) / 16
    out = step.attend(poison(torch.empty_like(step.q_THD)), **options)
    return row_error(out.cpu(), step.reference(**options))


def check_alone_and_in_a_crowd(
    heads: Heads, decodes: Sequence[Request], prefills: Sequence[Request], *, device: str = "cuda"
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


def check_merge(num_tokens: int, heads: Heads, *, device: str = "cuda") -> float:
    """Two parts of the keys merged, against softmax over both; a row in five has no first part."""
    shape = (num_tokens, heads.num_query_heads, heads.head_size)
    out_a, out_b = (torch.randn(shape, dtype=heads.dtype, device=device) for _ in range(2))
    lse_a, lse_b = (4 * torch.randn(shape[:2], device=device) for _ in range(2))
    lse_a[::5] = float("-inf")
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    expected_lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((part - expected_lse).exp()[..., None] for part in (lse_a, lse_b))
    expected = weight_a * out_a.float() + weight_b * out_b.float()
    return worst(row_error(out, expected), row_error(lse, expected_lse))


def prepare(
    heads: Heads,
    decodes: Sequence[Request],
    prefills: Sequence[Request],
    programs_a_multiprocessor: int = PROGRAMS_A_MULTIPROCESSOR,
    *,
    device: str = "cuda",
) -> Work:
    """One layer's attention of a step that is planned already."""
    step = PagedStep(
        heads,
        decodes,
        prefills,
        device=device,
        num_programs=num_programs() // PROGRAMS_A_MULTIPROCESSOR * programs_a_multiprocessor,
    )
    out = torch.empty_like(step.q_THD)
    return Work(
        call=lambda: step.attend(out),
        num_bytes=step.num_bytes(),
        num_flops=step.num_flops() if prefills else 0.0,
    )


def group() -> Group:
    def fp8(heads: Heads) -> Heads:
        return Heads(
            num_query_heads=heads.num_query_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            kv_dtype=FP8,
            sliding_window=heads.sliding_window,
        )

    scales = {"k_scale": 0.5, "v_scale": 2.0}
    both = {"decodes": DECODES, "prefills": PREFILLS}
    cases: dict[str, dict[str, Any]] = {
        "decode Llama-3.1-8B": {"heads": LLAMA, "decodes": DECODES, "prefills": []},
        "prefill Llama-3.1-8B": {"heads": LLAMA, "decodes": [], "prefills": PREFILLS},
        "mixed Llama-3.1-8B": {"heads": LLAMA} | both,
        "mixed Llama-3.1-8B fp8 cache": {"heads": fp8(LLAMA)} | both | scales,
        "mixed Qwen3-0.6B": {"heads": QWEN_SMALL} | both,
        "mixed SmolLM2 G=3 D=64": {"heads": SMOL} | both,
        "mixed SmolLM2 fp8 cache": {"heads": fp8(SMOL)} | both | scales,
        "mixed Qwen2.5 G=7 S=64": {"heads": QWEN25} | both,
        "mixed Phi D=80": {"heads": PHI} | both,
        "mixed Gemma window softcap": {"heads": GEMMA, "softcap": 30.0} | both,
        "mixed GPT-OSS window sinks": {"heads": GPT_OSS, "with_sinks": True} | both,
        "mixed alibi": {"heads": PHI, "with_alibi": True} | both,
        "speculative decode": {"heads": LLAMA, "decodes": SPECULATIVE, "prefills": []},
    }
    checks = [
        Check(f"attention {name}", functools.partial(check, **case), ROUNDING)
        for name, case in cases.items()
    ]
    for name, heads in (("Llama-3.1-8B", LLAMA), ("Gemma", GEMMA)):
        alone = functools.partial(check_alone_and_in_a_crowd, heads, DECODES, PREFILLS)
        checks.append(Check(f"attention {name} alone as in a crowd", alone, 0))
    merge = functools.partial(check_merge, 300, LLAMA)
    checks.append(Check("attention merge of two parts", merge, ROUNDING))
    return Group("attention", tuple(checks), _timings(fp8(LLAMA)))


def _timings(llama_fp8: Heads) -> tuple[Timing, ...]:
    def decode(name: str, after: str, heads: Heads, batch: int, length: int, n: int) -> Timing:
        work = functools.partial(prepare, heads, [(length, 1)] * batch, [], n)
        return Timing(f"decode {name} {batch} x {length}, {n} programs", f"attention {after}", work)

    def prefill(name: str, after: str, heads: Heads, requests: list[Request]) -> Timing:
        return Timing(name, f"attention {after}", functools.partial(prepare, heads, [], requests))

    decode_check, fp8_check = "decode Llama-3.1-8B", "mixed Llama-3.1-8B fp8 cache"
    llama = [
        decode("Llama-8B", decode_check, LLAMA, batch, length, programs)
        for batch, length in ((1, 1024), (1, 32768), (64, 1024), (256, 1024))
        for programs in (2, 4)
    ]
    prefill_check = "prefill Llama-3.1-8B"
    return (
        *llama,
        decode("Llama-8B fp8", fp8_check, llama_fp8, 64, 1024, 3),
        decode("Llama-8B fp8", fp8_check, llama_fp8, 256, 1024, 3),
        decode("Qwen3-0.6B", "mixed Qwen3-0.6B", QWEN_SMALL, 256, 1024, 3),
        decode("SmolLM2", "mixed SmolLM2 G=3 D=64", SMOL, 64, 1024, 3),
        prefill("prefill Llama-8B 8192", prefill_check, LLAMA, [(8192, 8192)]),
        prefill("prefill Llama-8B 4 x 2048", prefill_check, LLAMA, [(2048, 2048)] * 4),
        prefill("prefill Llama-8B 2048 after 6144", prefill_check, LLAMA, [(8192, 2048)]),
        prefill("prefill Llama-8B fp8 8192", fp8_check, llama_fp8, [(8192, 8192)]),
        prefill("prefill SmolLM2 8192", "mixed SmolLM2 G=3 D=64", SMOL, [(8192, 8192)]),
    )
