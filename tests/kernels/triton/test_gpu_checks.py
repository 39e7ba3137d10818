"""The GPU suite's checks and timings, rehearsed in the interpreter on small shapes.

A check that is itself wrong would waste the GPU machine's time. bf16 stores truncate here, so that
its errors may be twice those on a GPU.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from scripts.gpu.frame import Check
from scripts.gpu.groups import (
    activation,
    attention,
    block_copies,
    dense,
    dense_linear,
    fp8_linear,
    logits,
    logprobs,
    moe,
    norm,
    quantised_linear,
    rotary,
    sampling,
)
from scripts.gpu.paged_step import Heads

FLOAT32 = torch.float32
SMALL_HEADS = Heads(num_query_heads=3, num_kv_heads=1, head_size=32, dtype=FLOAT32)
WINDOW_HEADS = Heads(
    num_query_heads=4, num_kv_heads=2, head_size=16, dtype=FLOAT32, sliding_window=20
)
DECODES, PREFILLS = [(1, 1), (65, 1), (300, 1)], [(5, 5), (70, 30)]
SMALL_EXPERTS = (8, 2, 64, 32)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def test_attention():
    assert attention.check(SMALL_HEADS, DECODES, PREFILLS, device="cpu") < 1e-5
    options = {"with_sinks": True, "with_alibi": True, "softcap": 20.0}
    assert attention.check(WINDOW_HEADS, DECODES, PREFILLS, device="cpu", **options) < 1e-5
    fp8 = Heads(
        num_query_heads=2,
        num_kv_heads=1,
        head_size=16,
        dtype=FLOAT32,
        kv_dtype=torch.float8_e4m3fn,
    )
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    assert attention.check(fp8, [(65, 1)], [(9, 9)], device="cpu", **scales) < 1e-5


@pytest.mark.parametrize("heads", [SMALL_HEADS, WINDOW_HEADS])
def test_attention_alone_as_in_a_crowd(heads):
    error = attention.check_alone_and_in_a_crowd(heads, DECODES, PREFILLS, device="cpu")
    assert error == 0


def test_merged_attention():
    assert attention.check_merge(7, SMALL_HEADS, device="cpu") < 1e-5


def test_attention_work_counts_what_is_seen():
    work = attention.prepare(SMALL_HEADS, [(100, 1)], [], device="cpu")
    assert work.num_bytes == 100 * 2 * 32 * 4 + 2 * 3 * 32 * 4
    assert work.num_flops == 0
    work = attention.prepare(SMALL_HEADS, [], [(70, 30)], device="cpu")
    assert work.num_flops == 4 * (30 * 40 + 30 * 31 / 2) * 3 * 32
    assert attention.prepare(WINDOW_HEADS, [(100, 1)], [], device="cpu").num_bytes == (
        20 * 2 * 2 * 16 * 4 + 2 * 4 * 16 * 4
    )
    work.call()


def test_norm():
    assert norm.check(3, 72, FLOAT32, device="cpu") < 1e-5
    assert norm.check(3, 72, torch.float16, device="cpu") < norm.BF16_ROUNDING
    assert norm.check_quantised(3, 72, torch.int8, device="cpu") < 2e-2
    norm.prepare(2, 72, device="cpu").call()


def test_activation():
    assert activation.check(3, 70, FLOAT32, device="cpu") < 1e-5
    assert activation.check_quantised(3, 70, torch.int8, device="cpu") < 2e-2
    activation.prepare(2, 70, device="cpu").call()


def test_dense_linear():
    assert dense_linear.check(5, 70, 65, FLOAT32, device="cpu") < 1e-5
    rows = (1, 3, 66)
    assert dense_linear.check_same_bits(70, 65, FLOAT32, rows=rows, device="cpu") == 0
    error = dense_linear.check_attention_in_chunks(21, dtype=FLOAT32, device="cpu")
    assert error == 0
    dense_linear.prepare(2, 70, 65, device="cpu").call()


def test_logits():
    assert logits.check_masks(5, 1000, device="cpu") == 0
    assert logits.check_penalties(5, 1000, device="cpu") == 0
    logits.prepare_masks(2, 1000, device="cpu").call()
    logits.prepare_penalties(2, 1000, device="cpu").call()


@pytest.mark.parametrize("with_norm", [False, True])
def test_rotary(with_norm):
    shape = rotary.Shape(
        num_query_heads=3, num_kv_heads=1, head_size=32, rotary_size=16, with_norm=with_norm
    )
    assert rotary.check(shape, 9, torch.bfloat16, device="cpu") < 2 * rotary.ROUNDING
    rotary.prepare(shape, 3, device="cpu").call()


def test_mixture_of_experts():
    assert moe.check_routing(37, SMALL_EXPERTS, device="cpu") < 1e-5
    assert moe.check(9, SMALL_EXPERTS, dtype=FLOAT32, device="cpu") < 1e-5
    moe.prepare(2, SMALL_EXPERTS, device="cpu")


@pytest.mark.parametrize("limits", [False, True])
def test_sampling(limits):
    assert sampling.check(12, 1000, limits=limits, device="cpu") == 0
    sampling.prepare(2, 1000, limits=limits, device="cpu").call()


def test_torchs_own_operations():
    assert dense.check_linear(3, 64, 32, device="cpu") < dense.ROUNDING
    assert dense.check_attention(40, device="cpu") < dense.ROUNDING
    assert dense.prepare_linear(2, 64, 32, device="cpu").num_flops == 2 * 2 * 64 * 32
    dense.prepare_attention(9, device="cpu").call()


def test_float8_products():
    assert fp8_linear.check_rows(3, 72, device="cpu") < fp8_linear.FP8_ROUNDING
    assert fp8_linear.check(3, 64, 32, device="cpu") < 2 * fp8_linear.ROUNDING
    fp8_linear.prepare(2, 64, 32, device="cpu").call()


@pytest.mark.parametrize("overlapping", [False, True])
def test_block_copies(overlapping):
    small = {"block": (2, 1, 16, 16), "device": "cpu"}
    assert block_copies.check_copies(9, overlapping=overlapping, **small) == 0
    assert block_copies.check_swaps(9, **small) == 0


def test_logprobs():
    assert logprobs.check(4, 1000, device="cpu") < 1e-5
    logprobs.prepare(2, 1000, device="cpu").call()


@pytest.mark.parametrize("num_bits", [8, 4])
def test_quantised_linear(num_bits):
    options = {"num_bits": num_bits, "device": "cpu"}
    assert quantised_linear.check(3, 48, 256, dtype=FLOAT32, **options) < 1e-5
    assert quantised_linear.check(70, 48, 256, dtype=FLOAT32, symmetric=False, **options) < 1e-5
    work = quantised_linear.prepare(2, 48, 256, **options)
    assert work.num_bytes > 48 * 256 * num_bits / 8


def test_noise():
    assert sampling.check_words(100, device="cpu") == 0
    assert sampling.check_noise(2, 1000, device="cpu") < 1e-6


@pytest.mark.parametrize(
    "group",
    [
        *(activation, attention, block_copies, dense, fp8_linear, logits),
        *(logprobs, moe, norm, quantised_linear, rotary, sampling),
    ],
)
def test_every_timing_is_bound_to_a_check(group):
    built = group.group()
    built.validate()
    assert built.checks
    assert built.timings
    assert all(isinstance(check, Check) and check.tolerance < 2 for check in built.checks)
