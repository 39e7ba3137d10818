"""Matrix products: our own, quantised, float8, of experts."""

import pytest
import torch

from kernels.triton.linear.fp8 import library_multiplies_blocks
from kernels.triton.linear.gguf_blocks import GGUF_TYPES
from tests.gpu.checks import dense_linear, few_rows, fp8_linear, moe, quantised_linear
from tests.gpu.checks.errors import INVARIANT_ROWS
from tests.gpu.device import on_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "tolerance"),
    [
        (5, 70, 65, FP32, 1e-5),
        on_gpu(63, 4096, 6144, BF16, dense_linear.ROUNDING),
        on_gpu(130, 2570, 8195, BF16, dense_linear.ROUNDING),
        on_gpu(130, 576, 1537, FP32, 1e-5),
    ],
)
def test_our_own_product_is_that_of_float64(rows, inputs, outputs, dtype, tolerance, device):
    assert dense_linear.check(rows, inputs, outputs, dtype, device=device) <= tolerance


@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype", "rows"),
    [
        (70, 65, FP32, (1, 3, 66)),
        *(
            on_gpu(*shape, dtype, INVARIANT_ROWS)
            for shape in ((4096, 6144), (2570, 8195))
            for dtype in (BF16, FP16, FP32)
        ),
    ],
)
def test_our_own_product_gives_a_row_the_same_bits_in_every_batch(
    inputs, outputs, dtype, rows, device
):
    differing = dense_linear.check_same_bits(inputs, outputs, dtype, rows=rows, device=device)
    assert differing == 0


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "options"),
    [
        (3, 264, 70, FP16, {"norms": True, "activation": "gelu_tanh"}),
        *(
            on_gpu(rows, *shape, dtype, {"prefetch_bytes": ahead} | options)
            for rows, ahead, dtype in (
                (1, 0, BF16),
                (3, 1 << 18, BF16),
                (16, 1 << 20, FP16),
            )
            for shape, options in (
                ((4096, 6144), {"norms": True}),
                ((14336, 4096), {}),
                ((4096, 28672), {"activation": "silu"}),
                ((1024, 6144), {"norms": True, "activation": "silu"}),
                ((896, 1152), {"norms": True}),
                ((1544, 50257), {}),
            )
        ),
    ],
)
def test_products_of_few_rows_are_those_of_float64(rows, inputs, outputs, dtype, options, device):
    error = few_rows.check(rows, inputs, outputs, dtype, device=device, **options)
    assert error <= few_rows.FUSED_ROUNDING


FEW = {"rows": (1, 10)}
"""Of the interpreter."""


@pytest.mark.parametrize(
    ("check", "options"),
    [
        (fp8_linear.check_same_bits, {"inputs": 256, "outputs": 32, "grouped": True} | FEW),
        (
            quantised_linear.check_same_bits,
            {"inputs": 256, "outputs": 32, "num_bits": 4, "dtype": FP32} | FEW,
        ),
        (moe.check_same_bits, {"shape": (8, 2, 64, 32), "dtype": FP32} | FEW),
        *(
            on_gpu(few_rows.check_same_bits, {"inputs": i, "outputs": o, "norms": norms})
            for i, o, norms in ((4096, 6144, True), (14336, 4096, False), (1024, 4096, True))
        ),
        *(
            on_gpu(fp8_linear.check_same_bits, {"inputs": i, "outputs": o, "grouped": grouped})
            for i, o in ((4096, 28672), (14336, 4096))
            for grouped in (False, True)
        ),
        *(
            on_gpu(quantised_linear.check_same_bits, {"inputs": i, "outputs": o, "num_bits": bits})
            for i, o in ((4096, 28672), (14336, 4096))
            for bits in (4, 8)
        ),
        *(on_gpu(moe.check_same_bits, {"shape": shape}) for shape in (moe.QWEN3_MOE, moe.MIXTRAL)),
    ],
)
def test_products_of_every_format_give_a_row_the_same_bits_in_every_batch(check, options, device):
    assert check(device=device, **options) == 0


@pytest.mark.parametrize(("rows", "width"), [(3, 72), on_gpu(1, 4096), on_gpu(63, 14336)])
def test_rows_in_float8_are_within_its_rounding(rows, width, device):
    assert fp8_linear.check_rows(rows, width, device=device) <= fp8_linear.FP8_ROUNDING


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tolerance"),
    [
        (3, 256, 32, 2 * fp8_linear.ROUNDING),
        *(on_gpu(rows, 4096, 3072, fp8_linear.ROUNDING) for rows in (1, 17, 300)),
    ],
)
def test_a_float8_product_is_that_of_the_rounded_operands(
    rows, inputs, outputs, tolerance, grouped, device
):
    error = fp8_linear.check(rows, inputs, outputs, device=device, grouped=grouped)
    assert error <= tolerance


@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [on_gpu(rows, *each) for rows in (65, 300, 8192) for each in ((4096, 6144), (14464, 384))],
)
def test_blocks_of_float8_are_multiplied_by_our_kernel_and_by_the_library(
    rows, inputs, outputs, by_library, device
):
    if by_library and not library_multiplies_blocks(torch.device(device)):
        pytest.skip("torch multiplies blocks on Hopper alone, since CUDA 12.9")
    error = fp8_linear.check_blocks(rows, inputs, outputs, device=device, by_library=by_library)
    assert error <= fp8_linear.ROUNDING


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype", "tolerance"),
    [
        (3, 48, 256, FP32, 1e-5),
        (70, 48, 256, FP32, 1e-5),
        *(on_gpu(rows, 3072, 4096, BF16, quantised_linear.ROUNDING) for rows in (1, 16, 63, 300)),
    ],
)
def test_a_quantised_product_is_that_of_the_widened_weight(
    rows, outputs, inputs, dtype, tolerance, num_bits, symmetric, device
):
    error = quantised_linear.check(
        rows, outputs, inputs, num_bits=num_bits, symmetric=symmetric, dtype=dtype, device=device
    )
    assert error <= tolerance


@pytest.mark.parametrize(
    ("type_name", "rows", "outputs", "inputs"),
    [("IQ1_M", 3, 48, 256), *(on_gpu(name, 33, 768, 2048) for name in GGUF_TYPES)],
)
def test_every_gguf_type_is_multiplied_as_its_numbers_are(type_name, rows, outputs, inputs, device):
    widened, multiplied = quantised_linear.check_blocks(
        type_name, rows, outputs, inputs, device=device
    )
    assert widened <= 1e-7
    assert multiplied <= 1e-5


SMALL_EXPERTS = (8, 2, 64, 32)


@pytest.mark.parametrize(
    ("num_tokens", "shape"),
    [
        (37, SMALL_EXPERTS),
        *(on_gpu(rows, shape) for shape in (moe.QWEN3_MOE, moe.MIXTRAL) for rows in (1, 63, 1000)),
    ],
)
def test_experts_are_chosen_and_sorted_as_on_the_cpu(num_tokens, shape, device):
    assert moe.check_routing(num_tokens, shape, device=device) <= 1e-5


@pytest.mark.parametrize(
    ("num_tokens", "shape", "tile_rows", "dtype", "tolerance"),
    [
        (9, SMALL_EXPERTS, None, FP32, 1e-5),
        *(on_gpu(rows, moe.QWEN3_MOE, None, BF16, moe.ROUNDING) for rows in (1, 63, 1000)),
        *(on_gpu(300, moe.SMALL, rows, BF16, moe.ROUNDING) for rows in (16, 64, 128)),
    ],
)
def test_a_layer_of_experts_is_that_of_products_in_float32(
    num_tokens, shape, tile_rows, dtype, tolerance, device
):
    error = moe.check(num_tokens, shape, tile_rows=tile_rows, dtype=dtype, device=device)
    assert error <= tolerance
