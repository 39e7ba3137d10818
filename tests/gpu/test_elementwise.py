"""Norms, activations, rotation with the cache write, and copies of blocks."""

import pytest
import torch

from tests.gpu.checks import activation, block_copies, norm, rotary
from tests.gpu.device import on_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "tolerance"),
    [
        (3, 72, FP32, 1e-5),
        (3, 72, FP16, norm.BF16_ROUNDING),
        *(
            on_gpu(*shape, dtype, tolerance)
            for shape in ((1, 4096), (63, 576), (256, 1024), (513, 2560), (300, 4096), (7, 16384))
            for dtype, tolerance in ((BF16, norm.BF16_ROUNDING), (FP32, 1e-5))
        ),
    ],
)
def test_a_norm_is_that_of_torch_in_float32(rows, width, dtype, tolerance, device):
    assert norm.check(rows, width, dtype, device=device) <= tolerance


ROUNDED = [
    (3, 256, FP32),
    *(on_gpu(*shape, BF16) for shape in ((1, 4096), (63, 1024), (300, 14336), (7, 16384))),
]


@pytest.mark.parametrize(("rows", "width", "dtype"), ROUNDED)
def test_a_rounded_norm_has_the_bits_of_rounding_afterwards(rows, width, dtype, device):
    assert norm.check_rounded(rows, width, dtype, device=device) == 0


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "tolerance"),
    [
        (3, 70, FP32, 1e-5),
        *(
            on_gpu(*shape, dtype, tolerance)
            for shape in ((1, 14336), (63, 1536), (300, 14336), (257, 3072), (5, 65))
            for dtype, tolerance in ((BF16, activation.BF16_ROUNDING), (FP32, 1e-5))
        ),
    ],
)
def test_gated_activations_are_those_of_torch_in_float32(rows, width, dtype, tolerance, device):
    assert activation.check(rows, width, dtype, device=device) <= tolerance


@pytest.mark.parametrize(("rows", "width", "dtype"), ROUNDED)
def test_rounded_activations_have_the_bits_of_rounding_afterwards(rows, width, dtype, device):
    assert activation.check_rounded(rows, width, dtype, device=device) == 0


SMALL = {"num_query_heads": 3, "num_kv_heads": 1, "head_size": 32, "rotary_size": 16}


@pytest.mark.parametrize(
    ("shape", "num_tokens", "kv_dtype", "tolerance"),
    [
        # the interpreter truncates to bf16
        pytest.param(rotary.Shape(**SMALL), 9, BF16, 2 * rotary.ROUNDING, id="small"),
        pytest.param(
            rotary.Shape(**SMALL, with_norm=True), 9, BF16, 2 * rotary.ROUNDING, id="small, norm"
        ),
        *(
            on_gpu(shape, 333, BF16, rotary.ROUNDING, id=name)
            for name, shape in rotary.SHAPES.items()
        ),
        *(
            on_gpu(rotary.SHAPES[name], 333, FP8, rotary.FP8_ROUNDING, id=f"{name} fp8 cache")
            for name in ("Llama-3.1-8B", "Qwen3-0.6B")
        ),
    ],
)
def test_rotated_queries_and_the_cache_are_those_of_float32(
    shape, num_tokens, kv_dtype, tolerance, device
):
    assert rotary.check(shape, num_tokens, kv_dtype, device=device) <= tolerance


BLOCKS = [(9, (2, 1, 16, 16)), on_gpu(100, block_copies.BLOCK)]


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize(("pairs", "block"), BLOCKS)
def test_blocks_are_copied_also_where_pairs_overlap(pairs, block, overlapping, device):
    differing = block_copies.check_copies(
        pairs, overlapping=overlapping, block=block, device=device
    )
    assert differing == 0


@pytest.mark.parametrize(("pairs", "block"), BLOCKS)
def test_blocks_go_to_the_host_and_back(pairs, block, device):
    assert block_copies.check_swaps(pairs, block=block, device=device) == 0
