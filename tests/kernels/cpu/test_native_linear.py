"""Native dense products against float64: exact up to the quantisation of activations."""

import ctypes

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kernels.cpu.library import AVX2_VNNI, NativeLibrary, check
from kernels.cpu.linear import NativeLinear, PackedParts
from kernels.cpu.weights import (
    GGUF_KINDS,
    LinearKind,
    PackedLinear,
    pack_bfloat16,
    pack_float,
    pack_parts,
    quantise_int4,
    quantise_int8,
)
from tests.kernels.cpu.instruction_sets import SETS, covering_sets
from tests.kernels.gguf_parts import SCALES_AT, pack_gguf, random_blocks, random_part

ROWS = (1, 2, 5, 12, 13, 50)
# one panel is 32 outputs, a chain of sums 768 inputs
FLOAT_SHAPES = ((1, 1), (31, 7), (33, 64), (70, 512), (96, 513), (160, 1100))


def seen_activations(library: NativeLibrary, x_TE: torch.Tensor) -> torch.Tensor:
    """What the integer product makes of `x_TE`, in float64."""
    num_rows, num_inputs = x_TE.shape
    num_groups = -(-num_inputs // 32)
    codes = torch.empty(num_rows, num_groups, 32, dtype=torch.int8)
    scales = torch.empty(num_rows, num_groups)
    quantise = library.function(
        "ec_quantise_activations",
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    check(quantise(x_TE.data_ptr(), num_rows, num_inputs, codes.data_ptr(), scales.data_ptr()))
    x = (codes.double() * scales.double()[..., None]).flatten(1)
    return x[:, :num_inputs]


def assert_close(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> None:
    """Within 1e-5 of the largest that each sum could have been."""
    expected = x.double() @ w.double().T + bias.double()
    largest = x.double().abs() @ w.double().abs().T + bias.double().abs()
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= 1e-5 * largest + 1e-30).all()


def assert_rows_alone_have_the_same_bits(
    linear: NativeLinear, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor
) -> None:
    for row in {0, len(x) // 3, len(x) - 1}:
        assert torch.equal(linear(x[row : row + 1], weight)[0], out[row])
    assert torch.equal(linear(x[len(x) // 2 :], weight), out[len(x) // 2 :])


@pytest.mark.parametrize(("num_outputs", "num_inputs"), FLOAT_SHAPES)
def test_float_product_is_that_of_torch(
    library: NativeLibrary, isa: str, num_outputs: int, num_inputs: int
) -> None:
    linear = NativeLinear(library)
    w, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    weight = pack_float(library, w, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs)
        out = linear(x, weight)
        assert_close(out, x, w, bias)
        assert_rows_alone_have_the_same_bits(linear, x, weight, out)


def test_float_product_has_the_same_bits_on_all_vector_units(library: NativeLibrary) -> None:
    units = [isa for isa in SETS if isa in library.isas and isa != "portable"]
    if len(units) < 2:
        pytest.skip("needs a machine with several")
    linear = NativeLinear(library)
    weight = pack_float(library, torch.randn(100, 700))
    x = torch.randn(17, 700)
    with library.forced_isa(units[0]):
        narrow = linear(x, weight)
    for isa in units[1:]:
        with library.forced_isa(isa):
            assert torch.equal(linear(x, weight), narrow), isa


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (33, 7), (70, 130), (96, 1536)])
def test_int8_product_errs_by_quantisation_only(
    library: NativeLibrary, isa: str, num_outputs: int, num_inputs: int
) -> None:
    linear = NativeLinear(library)
    w, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    weight = quantise_int8(library, w, bias)
    scales = w.abs().amax(dim=1, keepdim=True) / 127
    stored = torch.round(w / scales).double() * scales.double()
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs)
        out = linear(x, weight)
        assert_close(out, seen_activations(library, x), stored, bias)
        assert_rows_alone_have_the_same_bits(linear, x, weight, out)


@covering_sets(num_inputs=[256, 768], num_outputs=[1, 33, 70], type_name=GGUF_KINDS)
def test_gguf_product_errs_by_quantisation_of_activations_only(
    library: NativeLibrary, isa: str, type_name: str, num_outputs: int, num_inputs: int
) -> None:
    linear = NativeLinear(library)
    blocks = random_blocks(type_name, num_outputs, num_inputs)
    stored = torch.from_numpy(
        dequantize(blocks.reshape(num_outputs, -1), GGMLQuantizationType[type_name])
    )
    bias = torch.randn(num_outputs)
    weight = pack_gguf(library, blocks, type_name, num_outputs, num_inputs, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs)
        out = linear(x, weight)
        assert_close(out, seen_activations(library, x), stored, bias)
        assert_rows_alone_have_the_same_bits(linear, x, weight, out)


@covering_sets(fill=[0, 0x80, 0x7F, 0xFF], type_name=GGUF_KINDS)
def test_products_of_the_largest_codes_do_not_overflow(
    library: NativeLibrary, isa: str, type_name: str, fill: int
) -> None:
    kind = GGMLQuantizationType[type_name]
    random = random_blocks(type_name, 3, 256).reshape(3, -1, GGML_QUANT_SIZES[kind][1])
    written = {"Q4_1": slice(0, 4), "Q5_1": slice(0, 4), "MXFP4": slice(0, 1)}
    scales = (SCALES_AT | written).get(type_name, slice(0, 2))
    blocks = np.full_like(random, fill)
    blocks[..., scales] = random[..., scales]
    stored = torch.from_numpy(dequantize(blocks.reshape(3, -1), kind))
    x = torch.ones(6, 256)
    x[1], x[2, ::2], x[3, 1::2], x[4].view(-1, 4)[:, :2] = -1, -1, -1, -1
    weight = pack_gguf(library, blocks.reshape(-1), type_name, 3, 256)
    out = NativeLinear(library)(x, weight)
    assert_close(out, seen_activations(library, x), stored, torch.zeros(3))


@pytest.mark.parametrize("type_name", GGUF_KINDS)
def test_gathered_rows_have_the_bits_of_ggufs_dequantisation(
    library: NativeLibrary, type_name: str
) -> None:
    blocks = random_blocks(type_name, 70, 768)
    stored = dequantize(blocks.reshape(70, -1), GGMLQuantizationType[type_name])
    weight = pack_gguf(library, blocks, type_name, 70, 768, torch.randn(70))
    ids = torch.tensor([0, 69, 31, 32, 33, 0, *range(64, 70), *range(40)])
    rows = NativeLinear(library).gather_rows(ids, weight)
    assert torch.equal(rows, torch.from_numpy(stored)[ids])


def some_weight(library: NativeLibrary, kind: str) -> PackedLinear:
    if kind in GGUF_KINDS:
        return pack_gguf(library, random_blocks(kind, 45, 512), kind, 45, 512)
    packer = quantise_int8 if kind == "int8" else quantise_int4
    return packer(library, torch.randn(45, 512) * torch.rand(45, 1))


@pytest.mark.parametrize("num_rows", [1, 4, 13])
@pytest.mark.parametrize("kind", ["int8", "int4", *GGUF_KINDS])
def test_avx_vnni_gives_the_bits_of_plain_avx2(
    library: NativeLibrary, kind: str, num_rows: int
) -> None:
    if not library.has_avx_vnni:
        pytest.skip("this machine has no AVX-VNNI")
    weight = some_weight(library, kind)
    x = torch.randn(num_rows, 512) * 3
    run = NativeLinear(library)
    with library.forced_isa("avx2"):
        plain = run(x, weight)
    with library.forced_isa(AVX2_VNNI):
        assert library.isa == "avx2"
        assert torch.equal(run(x, weight), plain)


@pytest.mark.parametrize("isa", ["neon_dot", "neon_i8mm"])
@pytest.mark.parametrize("kind", ["int8", "int4", *GGUF_KINDS])
def test_sets_of_arm_give_products_of_bytes_the_same_bits(
    library: NativeLibrary, kind: str, isa: str
) -> None:
    if isa not in library.isas:
        pytest.skip(f"this machine has no {isa}")
    weight = some_weight(library, kind)
    run = NativeLinear(library)
    for num_rows in ROWS:
        x = torch.randn(num_rows, 512) * 3
        with library.forced_isa("neon"):
            plain = run(x, weight)
        with library.forced_isa(isa):
            assert torch.equal(run(x, weight), plain)


def test_gathered_rows_are_the_stored_ones_of_every_own_kind(library: NativeLibrary) -> None:
    linear = NativeLinear(library)
    w = torch.randn(40, 75)
    ids = torch.tensor([[39, 0], [31, 32]])
    assert torch.equal(linear.gather_rows(ids, pack_float(library, w)), w[ids])
    rounded = w.bfloat16().float()
    assert torch.equal(linear.gather_rows(ids, pack_bfloat16(library, w)), rounded[ids])
    scales = w.abs().amax(dim=1, keepdim=True) / 127
    stored = torch.round(w / scales) * scales
    assert torch.equal(linear.gather_rows(ids, quantise_int8(library, w)), stored[ids])
    weight = quantise_int4(library, w)
    everything = linear.gather_rows(torch.arange(40), weight)
    assert torch.allclose(linear(torch.eye(75), weight).T, everything, rtol=1e-6, atol=1e-6)
    assert linear.gather_rows(torch.empty(0, dtype=torch.int64), weight).shape == (0, 75)


def test_ids_that_are_not_rows_are_refused(library: NativeLibrary) -> None:
    linear = NativeLinear(library)
    weight = pack_float(library, torch.randn(40, 64))
    for wrong in (-1, 40, 2**62):
        with pytest.raises(ValueError, match=rf"id {wrong} at 1 is not in \[0, 40\)"):
            linear.gather_rows(torch.tensor([0, wrong]), weight)
    for ids in (torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match="must be contiguous int64"):
            linear.gather_rows(ids, weight)


def test_parts_write_their_outputs_side_by_side(library: NativeLibrary, isa: str) -> None:
    linear = NativeLinear(library)
    w = torch.randn(106, 96)
    parts = (
        quantise_int8(library, w[:33], torch.randn(33)),
        pack_float(library, w[33:70]),
        quantise_int4(library, w[70:]),
    )
    for num_rows in (0, 1, 13):
        x = torch.randn(num_rows, 96)
        out = linear(x, PackedParts(parts))
        assert torch.equal(out, torch.cat([linear(x, part) for part in parts], dim=1))
    with pytest.raises(ValueError, match="must be equal"):
        PackedParts((parts[0], pack_float(library, torch.randn(3, 64))))


def test_int4_keeps_every_weight_within_half_a_step(library: NativeLibrary, isa: str) -> None:
    """Products with unit vectors read the weights back: an activation of 127/127 is exact."""
    linear = NativeLinear(library)
    w = torch.randn(40, 70)
    weight = quantise_int4(library, w)
    stored = linear(torch.eye(70), weight).T
    groups = torch.nn.functional.pad(w, (0, 26)).view(40, 3, 32)
    steps = (groups.amax(2) - groups.amin(2)) / 15
    # a minimum and fifteen scales, each rounded to 11 bits
    allowed = (steps / 2 + groups.abs().amax(2) * 2**-10).repeat_interleave(32, dim=1)[:, :70]
    assert weight.kind is LinearKind.Q4_MINIMUM
    assert ((stored - w).abs() <= allowed + 1e-6).all()


def test_activations_are_rounded_half_to_even_on_every_unit(
    library: NativeLibrary, isa: str
) -> None:
    x = torch.cat((torch.randn(3, 70), torch.zeros(1, 70), torch.full((1, 70), 1e-38)))
    x[0, :32] = torch.arange(-15.5, 16.5) / 127 * 4
    x[0, 0] = 4.0  # makes its group's scale 4 / 127
    padded = torch.nn.functional.pad(x, (0, 26)).view(5, 3, 32)
    largest = padded.abs().amax(2, keepdim=True)
    inverse = torch.where(largest > 1e-30, 127 / largest, torch.zeros(()))
    expected = torch.round(padded * inverse).double() * (largest / 127).double()
    assert torch.equal(seen_activations(library, x), expected.flatten(1)[:, :70])


def test_rows_apart_in_memory_and_no_rows_at_all(library: NativeLibrary, isa: str) -> None:
    linear = NativeLinear(library)
    w = torch.randn(70, 96)
    wide = torch.randn(9, 200)
    for weight in (pack_float(library, w), quantise_int8(library, w), quantise_int4(library, w)):
        out = linear(wide[:, 5:101], weight)
        assert torch.equal(out, linear(wide[:, 5:101].contiguous(), weight))
        assert linear(torch.empty(0, 96), weight).shape == (0, 70)


@pytest.mark.parametrize(("first", "num_inputs"), [(0, 1024), (515, 1000)])
def test_rows_whole_pages_apart_are_spread(
    library: NativeLibrary, isa: str, first: int, num_inputs: int
) -> None:
    """They would share places in the nearest cache: 24 of them and 1,024 outputs pay for a copy."""
    linear = NativeLinear(library)
    w, bias = torch.randn(1030, num_inputs), torch.randn(1030)
    weight = pack_float(library, w, bias)
    x = torch.randn(26, 2048)[:, first : first + num_inputs]
    out = linear(x, weight)
    assert_close(out, x, w, bias)
    assert_rows_alone_have_the_same_bits(linear, x, weight, out)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_others_alone(
    library: NativeLibrary, isa: str, bad: float
) -> None:
    linear = NativeLinear(library)
    w = torch.randn(40, 64)
    x = torch.randn(3, 64)
    for weight in (quantise_int8(library, w), quantise_int4(library, w)):
        good = linear(x, weight)
        broken = x.clone()
        broken[1, 33] = bad
        out = linear(broken, weight)
        assert out[1].isnan().all()
        assert torch.equal(out[[0, 2]], good[[0, 2]])


def test_wrong_inputs_are_refused_by_name(library: NativeLibrary) -> None:
    linear = NativeLinear(library)
    weight = pack_float(library, torch.randn(40, 64))
    with pytest.raises(TypeError, match="float64"):
        linear(torch.randn(2, 64, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match=r"\(2, 63\).*64"):
        linear(torch.randn(2, 63), weight)
    with pytest.raises(ValueError, match="contiguous"):
        linear(torch.randn(64, 2).T, weight)
    with pytest.raises(ValueError, match="contiguous"):
        linear(torch.randn(1, 64).expand(3, 64), weight)


def test_wrong_weights_are_refused_by_name(library: NativeLibrary) -> None:
    with pytest.raises(ValueError, match=r"rows of type 6 do not become a weight of kind 3"):
        pack_parts(library, LinearKind.Q4_GROUP, [random_part("Q8_0", 1, 32)])
    with pytest.raises(ValueError, match="multiple of 256"):
        pack_gguf(library, np.zeros(144, np.uint8), "Q4_K", 1, 288)
    with pytest.raises(ValueError, match=r"33 bytes; a block holds 32 in 34"):
        pack_gguf(library, np.zeros(33, np.uint8), "Q8_0", 1, 32)
    with pytest.raises(ValueError, match="bias of shape"):
        pack_float(library, torch.randn(4, 4), torch.randn(5))
    with pytest.raises(ValueError, match="finite"):
        quantise_int8(library, torch.full((2, 2), float("nan")))
    with pytest.raises(ValueError, match="int8"):
        quantise_int4(library, torch.full((2, 32), 1e6))


def test_the_library_itself_checks_a_weight_before_it_reads_one(library: NativeLibrary) -> None:
    weight = pack_float(library, torch.randn(40, 64))
    for field, value, words in (
        ("kind", 9, "kind 9"),
        ("blob_bytes", 64, "has 64 bytes"),
        ("num_outputs", 80, "needs"),
        ("num_inputs", 0, "does not exist"),
        ("blob", weight.blob.data_ptr() + 4, "aligned"),
    ):
        right = getattr(weight.arguments, field)
        setattr(weight.arguments, field, value)
        with pytest.raises(ValueError, match=words):
            NativeLinear(library)(torch.randn(1, 64), weight)
        setattr(weight.arguments, field, right)
