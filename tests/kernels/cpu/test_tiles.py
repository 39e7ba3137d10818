"""The matrix unit, or its emulation where a machine has none: one instruction against the manual's
pseudo-code in numpy, and products that have the bits of the vector units where they must."""

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.cpu.library import NativeFunction, NativeLibrary, check
from kernels.cpu.linear import NativeLinear
from kernels.cpu.weights import (
    GGUF_KINDS,
    PackedLinear,
    pack_bfloat16,
    quantise_int4,
    quantise_int8,
)
from tests.kernels.gguf_parts import pack_gguf, random_blocks

# below 16 rows bytes are left to the vector units, a tile of floats has 16 rows, two lie in a block
ROWS = (1, 15, 16, 17, 31, 33, 50, 70)
BF16, SIGNED, SIGNED_UNSIGNED, UNSIGNED_SIGNED = range(4)
SMALLEST_NORMAL = 2.0**-126


def prover(library: NativeLibrary) -> NativeFunction:
    p, n = ctypes.c_void_p, ctypes.c_int
    return library.function("ec_tiles_prove", n, n, p, p, p)


def by_one_instruction(
    library: NativeLibrary, product: int, x: np.ndarray, w: np.ndarray, sums: np.ndarray
) -> np.ndarray:
    out = sums.copy()
    check(prover(library)(product, 1, x.ctypes.data, w.ctypes.data, out.ctypes.data))
    return out


def flushed(values: np.ndarray) -> np.ndarray:
    """float64 to float32: to even, what would be denormal to zero."""
    with np.errstate(over="ignore"):
        is_tiny = abs((values * 2.0**100).astype(np.float32)) < SMALLEST_NORMAL * 2.0**100
        return np.where(is_tiny, np.copysign(0, values), values).astype(np.float32)


def tdpbf16ps(x: np.ndarray, w: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The manual's operation on bits [16, 32] of bfloat16. A sum of two float32 in float64, rounded
    once more, is what one rounding gives; a product of two bfloat16 is exact."""
    wide = [(bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for bits in (x, w)]
    a, b = (np.where(abs(v) < SMALLEST_NORMAL, np.copysign(0, v), v) for v in wide)
    old = np.where(abs(sums) < SMALLEST_NORMAL, np.copysign(0, sums), sums).astype(np.float64)
    temp = np.zeros((16, 32), np.float32)
    for k in range(16):
        for i in range(2):
            added = temp[:, i::2].astype(np.float64) + np.outer(a[:, 2 * k + i], b[k, i::2])
            temp[:, i::2] = flushed(added)
    both = flushed(temp[:, 0::2].astype(np.float64) + temp[:, 1::2])
    return flushed(old + both)


@pytest.mark.parametrize("largest_exponent", [0, 20, 63, -40, -62, -66])
def test_a_product_of_bfloat16_tiles_has_the_manuals_order_rounding_and_zeros(
    library: NativeLibrary, matrix_isa: str, largest_exponent: int
) -> None:
    generator = np.random.default_rng(largest_exponent + 200)
    exponents = generator.integers(-30, 1, (2, 16, 32)) + largest_exponent
    numbers = (generator.standard_normal((2, 16, 32)) * 2.0**exponents).astype(np.float32)
    x, w = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    x[0] = generator.integers(0, 128, 32)  # denormals
    sums = (generator.standard_normal((16, 16)) * 2.0 ** (2 * largest_exponent)).astype(np.float32)
    sums[1] = 1e-40
    expected = tdpbf16ps(x, w, sums)
    out = by_one_instruction(library, BF16, x, w, sums)
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("product", [SIGNED, SIGNED_UNSIGNED, UNSIGNED_SIGNED])
def test_a_product_of_tiles_of_bytes_is_exact_and_wraps(
    library: NativeLibrary, matrix_isa: str, product: int
) -> None:
    generator = np.random.default_rng(product)
    x, w = generator.integers(0, 256, (2, 16, 64)).astype(np.uint8)
    sums = generator.integers(-(2**31), 2**31, (16, 16)).astype(np.int32)
    left = (x if product == UNSIGNED_SIGNED else x.view(np.int8)).astype(np.int64)
    right = (
        (w if product == SIGNED_UNSIGNED else w.view(np.int8))
        .astype(np.int64)
        .reshape(16, 16, 4)
        .transpose(0, 2, 1)
        .reshape(64, 16)
    )
    expected = (sums + left @ right).astype(np.int32)
    assert np.array_equal(by_one_instruction(library, product, x, w, sums), expected)


def test_a_thread_that_has_not_loaded_the_shapes_of_tiles_meets_an_illegal_instruction(
    library: NativeLibrary, matrix_isa: str
) -> None:
    """So does a kernel that forgets them, in the emulation too."""
    memory = np.zeros((3, 16, 64), np.uint8)
    prove, addresses = prover(library), [part.ctypes.data for part in memory]
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        prove(BF16, 0, *addresses)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGILL


def test_the_unit_is_used_only_where_the_processor_has_it(library: NativeLibrary) -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert library.machine_isa != "amx" or "amx_tile" in flags
    assert library.machine_isa != "amx_emulated"


def byte_weights(library: NativeLibrary, num_outputs: int, num_inputs: int) -> list[PackedLinear]:
    w, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    packed = [quantise_int8(library, w, bias), quantise_int4(library, w)]
    for name in GGUF_KINDS if num_inputs % 256 == 0 else ():
        blocks = random_blocks(name, num_outputs, num_inputs)
        packed.append(pack_gguf(library, blocks, name, num_outputs, num_inputs, bias))
    return packed


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 7), (70, 100), (48, 1024)])
def test_products_of_bytes_have_the_bits_of_the_vector_units(
    library: NativeLibrary, matrix_isa: str, num_outputs: int, num_inputs: int
) -> None:
    linear = NativeLinear(library)
    for weight in byte_weights(library, num_outputs, num_inputs):
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_inputs)
            out = linear(x, weight)
            with library.forced_isa("avx512"):
                assert torch.equal(linear(x, weight), out), (weight.kind, num_rows)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (33, 64), (70, 513), (96, 1500)])
def test_products_of_bfloat16_have_the_same_bits_in_every_batch(
    library: NativeLibrary, matrix_isa: str, num_outputs: int, num_inputs: int
) -> None:
    linear = NativeLinear(library)
    w, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    rounded = w.bfloat16().double()
    for weight, start in (
        (pack_bfloat16(library, w, bias), bias.double()),
        (pack_bfloat16(library, w), torch.zeros(())),
    ):
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_inputs)
            expected = x.bfloat16().double() @ rounded.T + start
            largest = x.double().abs() @ rounded.abs().T + 1
            out = linear(x, weight)
            assert ((out.double() - expected).abs() <= 1e-6 * largest).all()
            for row in {0, num_rows // 3, num_rows - 1}:
                assert torch.equal(linear(x[row : row + 1], weight)[0], out[row])


def test_results_written_past_the_caches_are_the_same(
    library: NativeLibrary, matrix_isa: str
) -> None:
    linear = NativeLinear(library)
    w, x = torch.randn(32_768, 64), torch.randn(33, 64)
    for weight in (pack_bfloat16(library, w), quantise_int4(library, w)):
        out = linear(x, weight)  # 4 MiB
        assert torch.equal(out, torch.cat([linear(x[:16], weight), linear(x[16:], weight)]))


def test_rows_that_are_not_finite_leave_others_alone(
    library: NativeLibrary, matrix_isa: str
) -> None:
    linear = NativeLinear(library)
    w, x = torch.randn(40, 64), torch.randn(20, 64)
    for weight in (pack_bfloat16(library, w), quantise_int8(library, w)):
        good = linear(x, weight)
        broken = x.clone()
        broken[3, 33] = float("nan")
        out = linear(broken, weight)
        assert out[3].isnan().all()
        others = torch.arange(20) != 3
        assert torch.equal(out[others], good[others])
