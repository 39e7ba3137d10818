"""Paged attention: decodes, prefills, both in one step, and the options of models."""

from dataclasses import replace

import pytest
import torch

from kernels.triton.attention.work import AttentionVariant
from tests.gpu.checks import attention, dense_linear
from tests.gpu.checks.attention import (
    DECODES,
    GEMMA,
    GPT_OSS,
    LLAMA,
    PHI,
    PREFILLS,
    QWEN25,
    QWEN_SMALL,
    ROUNDING,
    SMOL,
    SPECULATIVE,
)
from tests.gpu.checks.paged_step import Heads
from tests.gpu.device import in_interpreter, on_gpu

FP8, FP16, FP32 = torch.float8_e4m3fn, torch.float16, torch.float32
IN_GLUON = AttentionVariant(prompts_in_gluon=True)
BY_BITS = AttentionVariant(float8_by_bits=True)
SMALL = Heads(num_query_heads=3, num_kv_heads=1, head_size=32, dtype=FP32)
WINDOW = Heads(num_query_heads=4, num_kv_heads=2, head_size=16, dtype=FP32, sliding_window=20)
SMALL_FP8 = Heads(num_query_heads=2, num_kv_heads=1, head_size=16, dtype=FP32, kv_dtype=FP8)
FEW_DECODES, FEW_PREFILLS = [(1, 1), (65, 1), (300, 1)], [(5, 5), (70, 30)]
ALL_OPTIONS = {"with_sinks": True, "with_alibi": True, "softcap": 20.0}


def in_fp8(heads):
    return attention.with_cache(heads, FP8)


@pytest.mark.parametrize(
    ("heads", "decodes", "prefills", "options", "tolerance"),
    [
        in_interpreter(SMALL, FEW_DECODES, FEW_PREFILLS, {}, 1e-5, id="small"),
        in_interpreter(WINDOW, FEW_DECODES, FEW_PREFILLS, ALL_OPTIONS, 1e-5, id="all options"),
        in_interpreter(
            SMALL, [(64, 1), (300, 1)], [], {"shortest_split": 64}, 1e-5, id="splits of 64"
        ),
        in_interpreter(SMALL_FP8, [(65, 1)], [(9, 9)], {}, 1e-5, id="small fp8"),
        on_gpu(LLAMA, DECODES, [], {}, ROUNDING, id="decode Llama-3.1-8B"),
        on_gpu(LLAMA, [], PREFILLS, {}, ROUNDING, id="prefill Llama-3.1-8B"),
        on_gpu(LLAMA, DECODES, [], {"shortest_split": 64}, ROUNDING, id="splits of 64"),
        on_gpu(LLAMA, SPECULATIVE, [], {}, ROUNDING, id="speculative decode"),
        *(
            on_gpu(heads, DECODES, PREFILLS, {"variant": variant}, ROUNDING, id=name)
            for name, heads, variant in (
                ("Llama-3.1-8B in Gluon", LLAMA, IN_GLUON),
                ("Llama-3.1-8B in Gluon, blocks of 128", replace(LLAMA, block_size=128), IN_GLUON),
                ("SmolLM2 in Gluon", SMOL, IN_GLUON),
                ("GPT-OSS in Gluon", GPT_OSS, IN_GLUON),
                ("Llama-3.1-8B fp8 by bits", in_fp8(LLAMA), BY_BITS),
                ("SmolLM2 float16 fp8 by bits", in_fp8(replace(SMOL, dtype=FP16)), BY_BITS),
            )
        ),
        *(
            on_gpu(heads, DECODES, PREFILLS, options, ROUNDING, id=f"mixed {name}")
            for name, heads, options in (
                ("Llama-3.1-8B", LLAMA, {}),
                ("Llama-3.1-8B fp8 cache", in_fp8(LLAMA), {}),
                ("Qwen3-0.6B", QWEN_SMALL, {}),
                ("SmolLM2 G=3 D=64", SMOL, {}),
                ("SmolLM2 fp8 cache", in_fp8(SMOL), {}),
                ("Qwen2.5 G=7 S=64", QWEN25, {}),
                ("Phi D=80", PHI, {}),
                ("Gemma window softcap", GEMMA, {"softcap": 30.0}),
                ("GPT-OSS window sinks", GPT_OSS, {"with_sinks": True}),
                ("alibi", PHI, {"with_alibi": True}),
            )
        ),
    ],
)
def test_attention_is_that_of_the_specification(
    heads, decodes, prefills, options, tolerance, device
):
    assert attention.check(heads, decodes, prefills, device=device, **options) <= tolerance


@pytest.mark.parametrize(
    ("heads", "decodes", "prefills"),
    [
        pytest.param(SMALL, FEW_DECODES, FEW_PREFILLS, id="small"),
        pytest.param(WINDOW, FEW_DECODES, FEW_PREFILLS, id="window"),
        on_gpu(LLAMA, DECODES, PREFILLS, id="Llama-3.1-8B"),
        on_gpu(GEMMA, DECODES, PREFILLS, id="Gemma"),
    ],
)
def test_a_request_has_the_same_bits_alone_and_in_a_crowd(heads, decodes, prefills, device):
    differing = attention.check_alone_and_in_a_crowd(heads, decodes, prefills, device=device)
    assert differing == 0


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (21, {"dtype": FP32}),
        on_gpu(300, {}),
        on_gpu(1100, {"heads": 32, "head_size": 128}),
        on_gpu(1100, {"heads": 32, "head_size": 128, "kv_dtype": torch.float8_e4m3fn}),
    ],
)
def test_batch_invariant_attention_has_the_same_bits_in_chunks(length, options, device):
    differing = dense_linear.check_attention_in_chunks(length, device=device, **options)
    assert differing == 0


def test_bytes_and_operations_count_what_is_seen(device):
    step = attention.make_step(SMALL, [(100, 1)], [], device=device)
    assert step.num_bytes() == 100 * 2 * 32 * 4 + 2 * 3 * 32 * 4
    step = attention.make_step(SMALL, [], [(70, 30)], device=device)
    assert step.num_flops() == 4 * (30 * 40 + 30 * 31 / 2) * 3 * 32
    step = attention.make_step(WINDOW, [(100, 1)], [], device=device)
    assert step.num_bytes() == 20 * 2 * 2 * 16 * 4 + 2 * 4 * 16 * 4
