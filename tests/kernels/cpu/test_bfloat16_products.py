"""Products of bfloat16 weights: the sums of rounded values in float64, on every instruction set."""

import pytest
import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import NativeLinear
from kernels.cpu.operations import CpuOperations
from kernels.cpu.packing import NativePacking
from kernels.cpu.weights import LinearKind, PackedLinear, pack_bfloat16

ROWS = (1, 2, 5, 12, 13, 50)
# a panel is 32 outputs, a group 32 inputs, a chain of sums 1536
SHAPES = ((1, 1), (31, 7), (33, 64), (70, 513), (96, 1537), (160, 3100))


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_the_product_is_that_of_rounded_values_with_the_same_bits_on_every_set(
    library: NativeLibrary, num_outputs: int, num_inputs: int
) -> None:
    linear = NativeLinear(library)
    w, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    weight = pack_bfloat16(library, w, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs)
        expected = rounded(x) @ rounded(w).T + bias.double()
        largest = rounded(x).abs() @ rounded(w).abs().T + bias.double().abs()
        with library.forced_isa("portable"):
            out = linear(x, weight)
        assert ((out.double() - expected).abs() <= 1e-6 * largest).all()
        for isa in library.isas:
            if isa.startswith("amx"):
                continue  # other sums, see test_tiles.py
            with library.forced_isa(isa):
                own = linear(x, weight)
                if isa == "neon_i8mm":  # other sums, rounded to odd
                    assert ((own.double() - expected).abs() <= 2e-6 * largest).all()
                else:
                    assert torch.equal(own, out), isa
                for row in {0, num_rows // 3, num_rows - 1}:
                    assert torch.equal(linear(x[row : row + 1], weight)[0], own[row])


def test_panels_hold_pairs_of_inputs_and_zeros_behind_the_last(library: NativeLibrary) -> None:
    w = torch.arange(1.0, 70 * 45 + 1).view(70, 45).bfloat16()
    blob = pack_bfloat16(library, w).blob.view(torch.bfloat16)
    padded = torch.nn.functional.pad(w, (0, 64 - 45, 0, 96 - 70))
    assert torch.equal(blob.view(3, 32, 32, 2), padded.view(3, 32, 32, 2).transpose(1, 2))


def test_values_are_rounded_to_even_and_what_is_not_finite_stays_in_its_row(
    library: NativeLibrary,
) -> None:
    linear = NativeLinear(library)
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.38e38, 1e-30]).repeat(13)
    weight = pack_bfloat16(library, torch.eye(65))
    assert torch.equal(linear(halves[None], weight)[0], halves.bfloat16().float())
    x = torch.randn(3, 65)
    good = linear(x, weight)
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[1, 33] = bad
        out = linear(broken, weight)
        assert out[1].isnan().any()
        assert torch.equal(out[[0, 2]], good[[0, 2]])


def test_a_model_in_bfloat16_keeps_its_routers_in_float32(library: NativeLibrary) -> None:
    packing = NativePacking(library, "bfloat16")
    parts = [torch.randn(40, 64).half(), torch.randn(24, 64).bfloat16()]
    together = packing.pack("qkv", parts)
    router = packing.pack("router", [torch.randn(8, 64)], least_bits=32)
    assert isinstance(together, PackedLinear)
    assert isinstance(router, PackedLinear)
    assert (together.kind, router.kind) == (LinearKind.BF16, LinearKind.F32)
    assert packing.bytes_by_format() == {"bfloat16": 2 * 64 * 64, "float32": 4 * 32 * 64}
    rows = NativeLinear(library).gather_rows(torch.arange(64), together)
    assert torch.equal(rows, torch.cat([part.float() for part in parts]).bfloat16().float())


def test_the_set_is_named_where_it_decides_the_bits(library: NativeLibrary) -> None:
    """A stream of a float32 model may go on with an engine that has no units for bfloat16."""
    isa, plain = {
        "avx512_bf16": ("avx512_bf16", "avx512"),
        "amx": ("avx512_bf16", "avx512"),
        "neon_i8mm": ("neon_i8mm", "neon"),
    }.get(library.machine_isa, ("", ""))
    if not isa:
        pytest.skip("this machine does not multiply bfloat16")
    with library.forced_isa(isa):
        assert CpuOperations(library).name == f"native-cpu-{plain}"
        assert CpuOperations(library, linear_weights="int8").name == f"native-cpu-{plain}"
        of_bfloat16 = CpuOperations(library, linear_weights="bfloat16")
        assert of_bfloat16.name == f"native-cpu-{isa}"
