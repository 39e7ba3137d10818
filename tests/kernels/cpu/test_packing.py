"""Weights of a model: which layout each part gets, side by side, and taken from a file."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import NativeLinear, PackedParts
from kernels.cpu.operations import CpuOperations
from kernels.cpu.packing import NativePacking
from kernels.cpu.weights import (
    GGUF_KINDS,
    LinearKind,
    PackedLinear,
    pack_float,
    pack_parts,
    quantise_int4,
    quantise_int8,
)
from kernels.interface.weights import PackedFileError, QuantisedTensor
from tests.kernels.gguf_parts import random_part


def unreadable(part: QuantisedTensor) -> QuantisedTensor:
    """The same from outside, and nothing inside."""

    return QuantisedTensor(part.type_name, part.shape, {}, unread)


def unread(arrays: object) -> torch.Tensor:
    raise AssertionError("it was dequantised before it was packed")


@pytest.mark.parametrize("type_name", [*GGUF_KINDS, "Q5_0"])
def test_rows_of_a_packed_matrix_are_those_of_the_file_wherever_they_lie(
    library: NativeLibrary, type_name: str
) -> None:
    order = torch.randperm(45, generator=torch.Generator().manual_seed(1))[:44]
    parts = [random_part(type_name, size, 512) for size in (7, 64, 3)]
    parts.insert(1, replace(random_part(type_name, 45, 512), shape=(44, 512), row_order_N=order))
    weight = NativePacking(library).pack("table", parts)
    wanted = torch.cat([part.dequantise() for part in parts])
    ids = torch.arange(118)
    assert torch.equal(CpuOperations(library).embedding(ids, weight), wanted)
    assert not weight.blob.view(4, -1, 32)[3, :2, 22 * 2 :].any()


@pytest.mark.parametrize(
    "type_name", ["Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
)
def test_blocks_become_the_floats_that_gguf_says_wherever_their_rows_lie(
    library: NativeLibrary, type_name: str
) -> None:
    kind = GGMLQuantizationType[type_name]
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_inputs = 3 * block_inputs
    generator = np.random.default_rng(len(type_name))
    raw = generator.integers(0, 256, (45, 3 * block_bytes)).astype(np.uint8)
    with np.errstate(invalid="ignore"):  # any bytes: some scales are not finite
        values = dequantize(raw, kind)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(2))
    blocks = QuantisedTensor(
        type_name, (45, num_inputs), {"blocks": torch.from_numpy(raw)}, unread, order
    )
    before, behind = torch.randn(7, num_inputs).half(), torch.randn(50, num_inputs).bfloat16()
    packed = pack_parts(library, LinearKind.F32, [before, blocks, behind])
    rows = NativeLinear(library).gather_rows(torch.arange(102), packed)
    wanted = torch.cat([before.float(), torch.from_numpy(values)[order], behind.float()])
    same = rows.view(torch.int32) == wanted.view(torch.int32)
    assert bool((same | (rows.isnan() & wanted.isnan())).all())
    assert not packed.blob.view(torch.float32).view(-1, num_inputs, 32)[-1, :, 6:].any()


def test_parts_of_one_type_become_one_weight_in_their_own_order(library: NativeLibrary) -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    parts = [random_part("Q4_1", 40, 64, order=order), random_part("Q4_1", 8, 64)]
    bias = torch.randn(48)
    packed = NativePacking(library).pack("qk", parts, bias)
    assert isinstance(packed, PackedLinear)
    linear = NativeLinear(library)
    rows = linear.gather_rows(torch.arange(48), packed)
    assert torch.equal(rows, torch.cat([part.dequantise() for part in parts]))
    assert torch.equal(rows[:40], random_part("Q4_1", 40, 64).dequantise()[order])
    assert torch.equal(linear(torch.zeros(1, 64), packed)[0], bias)


def test_parts_of_unlike_types_stand_side_by_side_in_one_product(library: NativeLibrary) -> None:
    parts = [
        random_part("Q4_0", 40, 256),
        random_part("Q5_0", 33, 256),
        random_part("Q8_0", 31, 256),  # what Q5_0 becomes: one weight with the part before
        torch.randn(9, 256, dtype=torch.bfloat16),
    ]
    bias = torch.randn(113)
    packing = NativePacking(library)
    packed = packing.pack("qkv", parts, bias)
    assert isinstance(packed, PackedParts)
    kinds = [part.kind for part in packed.parts]
    assert kinds == [LinearKind.Q4_GROUP, LinearKind.Q8_GROUP, LinearKind.F32]
    assert set(packing.bytes_by_format()) == {"Q4_0", "Q8_0", "float32"}
    x = torch.randn(5, 256)
    out = CpuOperations(library).linear(x, packed)
    start = 0
    for part in parts:
        alone = NativePacking(library).pack("one", [part], bias[start : start + part.shape[0]])
        stop = start + part.shape[0]
        assert torch.equal(out[:, start:stop], CpuOperations(library).linear(x, alone))
        start = stop
    assert start == out.shape[1]


def test_a_type_without_a_product_is_dequantised(library: NativeLibrary) -> None:
    part = replace(random_part("Q5_1", 33, 64), type_name="fp6")
    packing = NativePacking(library)
    packed = packing.pack("down", [part])
    assert isinstance(packed, PackedLinear)
    assert packed.kind is LinearKind.F32
    rows = NativeLinear(library).gather_rows(torch.arange(33), packed)
    assert torch.equal(rows, part.dequantise())


@pytest.mark.parametrize(
    ("floats", "least_bits", "packer"),
    [
        ("float32", 4, pack_float),
        ("int8", 4, quantise_int8),
        ("int8", 32, pack_float),
        ("int4", 4, quantise_int4),
        ("int4", 8, quantise_int8),
        ("int4", 32, pack_float),
    ],
)
def test_floats_are_kept_in_the_format_asked_for_or_the_next_with_enough_bits(
    library: NativeLibrary, floats, least_bits, packer
) -> None:
    parts = [torch.randn(20, 64), torch.randn(20, 64)]
    packed = NativePacking(library, floats).pack("up", parts, least_bits=least_bits)
    x = torch.randn(3, 64)
    linear = NativeLinear(library)
    assert torch.equal(linear(x, packed), linear(x, packer(library, torch.cat(parts))))


def test_blocks_may_be_made_floats_and_those_quantised(library: NativeLibrary) -> None:
    part = random_part("Q4_1", 40, 64)
    x = torch.randn(3, 64)
    linear = NativeLinear(library)
    for floats, packer in (("float32", pack_float), ("int8", quantise_int8)):
        packing = NativePacking(library, floats, keeps_blocks=False)
        packed = packing.pack("q", [part])
        assert torch.equal(linear(x, packed), linear(x, packer(library, part.dequantise())))
        assert set(packing.bytes_by_format()) == {floats}


def test_a_second_start_takes_weights_from_the_file_and_reads_no_part(
    library: NativeLibrary, tmp_path: Path
) -> None:
    file = tmp_path / "model.weights"
    parts = [random_part("Q4_1", 40, 64), random_part("Q8_0", 24, 64)]
    table, bias = random_part("Q8_0", 70, 64), torch.randn(64)
    first = NativePacking(library)
    first.create(tmp_path, 1 << 20)
    packed = first.pack("qk", parts, bias), first.pack("table", [table])
    assert first.num_bytes_to_save() == sum(first.bytes_by_format().values())
    first.save(file)()

    second = NativePacking(library)
    second.open(file)
    again = (
        second.pack("qk", [unreadable(part) for part in parts], bias),
        second.pack("table", [unreadable(table)]),
    )
    x = torch.randn(3, 64)
    linear = NativeLinear(library)
    for one, other in zip(packed, again, strict=True):
        assert torch.equal(linear(x, one), linear(x, other))
    assert second.bytes_by_format() == first.bytes_by_format()
    assert second.num_mapped_bytes() == first.num_mapped_bytes()
    assert second.num_mapped_bytes() == sum(second.bytes_by_format().values())
    assert second.num_bytes_to_save() == 0


def test_what_the_file_does_not_hold_is_packed_and_added(
    library: NativeLibrary, tmp_path: Path
) -> None:
    file = tmp_path / "model.weights"
    first = NativePacking(library)
    first.pack("q", [random_part("Q4_1", 40, 64)])
    first.save(file)()
    second = NativePacking(library)
    second.open(file)
    other = random_part("Q4_1", 33, 64)
    packed = second.pack("q", [other])
    assert isinstance(packed, PackedLinear)
    rows = NativeLinear(library).gather_rows(torch.arange(33), packed)
    assert torch.equal(rows, other.dequantise())
    assert second.num_bytes_to_save() == packed.num_bytes


def test_floating_weights_are_not_kept_in_the_file(library: NativeLibrary) -> None:
    packing = NativePacking(library)
    packing.pack("router", [torch.randn(8, 64)])
    assert packing.num_bytes_to_save() == 0


def test_a_file_of_another_name_is_refused(library: NativeLibrary, tmp_path: Path) -> None:
    file = tmp_path / "model.weights"
    packing = NativePacking(library)
    packing.pack("q", [random_part("Q4_1", 40, 64)])
    packing.save(file)()
    file = file.rename(tmp_path / "another.weights")
    with pytest.raises(PackedFileError, match=str(file)):
        NativePacking(library).open(file)


def test_what_does_not_fit_is_refused_by_name(library: NativeLibrary) -> None:
    with pytest.raises(ValueError, match=r"mlp: parts of shapes \(4, 64\), \(4, 32\)"):
        NativePacking(library).pack("mlp", [torch.randn(4, 64), torch.randn(4, 32)])
    with pytest.raises(ValueError, match='"int3", only float32, bfloat16, int8, int4'):
        NativePacking(library, "int3")  # type: ignore[arg-type]
