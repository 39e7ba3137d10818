"""Codes of folders in the packed layout, and through the kernels, against their own numbers."""

import pytest
import torch

from kernels.interface.weights import GroupedCodes, QuantisedTensor
from kernels.triton.linear.grouped_codes import CODE_BITS, from_codes
from kernels.triton.linear.quantised_weights import E2M1, dequantise
from kernels.triton.operations import TritonOperations

NF4 = [-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]


def made(type_name, group_size, num_outputs=20, num_inputs=256):
    generator = torch.Generator().manual_seed(3)
    shape, of_groups = (num_outputs, num_inputs), (num_outputs, num_inputs // group_size)
    scales = torch.rand(of_groups, generator=generator) * 0.01 + 0.001
    bits = CODE_BITS[type_name]
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=generator)
    if type_name in ("w8a8", "bnb-int8"):
        return GroupedCodes(codes.view(torch.int8), scales)
    if "a16" in type_name:
        zeros = torch.randint(0, 2**bits, of_groups, dtype=torch.uint8, generator=generator)
        return GroupedCodes(codes, scales, zeros)
    table = E2M1 if type_name == "nvfp4" else [NF4[place ^ 5] for place in range(16)]
    return GroupedCodes(codes, scales, table=torch.tensor(table))


GROUPS = {"w4a16": 64, "w8a16": 128, "w8a8": 256, "bnb-int8": 256, "nvfp4": 16, "bnb-nf4": 64}


@pytest.mark.parametrize("type_name", CODE_BITS)
def test_codes_stay_and_are_multiplied_as_their_numbers_are(type_name):
    codes = made(type_name, GROUPS[type_name])
    weight = from_codes(codes, CODE_BITS[type_name])
    expected = codes.dequantise()
    assert weight.num_bits == CODE_BITS[type_name]
    assert weight.group_size == GROUPS[type_name]
    # offsets are -scale * zero, and nf4 is rounded to 1/4096 of a group's largest
    steps = codes.scales_NG.repeat_interleave(weight.group_size, dim=1)
    off = ((dequantise(weight) - expected).abs() / steps).max()
    assert off <= (1 / 8192 if type_name == "bnb-nf4" else 4e-5 if "a16" in type_name else 0)
    ops = TritonOperations(torch.device("cpu"), quantised_types=frozenset({type_name}))
    packing = ops.weight_packing(torch.float32)
    part = QuantisedTensor(type_name, tuple(expected.shape), {}, lambda arrays: codes)
    packed = packing.pack("one", [part])
    assert packing.bytes_by_format().keys() == {type_name}
    x = torch.randn(5, 256)
    result = ops.linear(x, packed)
    torch.testing.assert_close(result, x @ dequantise(weight).T, rtol=1e-4, atol=1e-4)


def test_symmetric_codes_have_no_offsets_and_what_does_not_fit_is_dequantised():
    codes = made("w4a16", 32)
    codes.zeros_NG.fill_(8)
    assert from_codes(codes, 4).offsets_NG is None
    sizes = torch.tensor([0, 1, 128, 192, 64, 96, 32, 48]) / 192
    fp4 = torch.cat([sizes, -sizes])
    for each in (made("w4a16", 8), made("w8a8", 16, num_inputs=48),
                 GroupedCodes(codes.codes_NE, codes.scales_NG, table=fp4)):  # fmt: skip
        assert from_codes(each, 4) is None
        part = QuantisedTensor("w4a16", tuple(each.codes_NE.shape), {}, lambda _, each=each: each)
        ops = TritonOperations(torch.device("cpu"), quantised_types=frozenset({"w4a16"}))
        packing = ops.weight_packing(torch.float32)
        weight = packing.pack("one", [part])
        assert packing.bytes_by_format().keys() == {"float32"}
        x = torch.randn(3, each.codes_NE.shape[1])
        torch.testing.assert_close(ops.linear(x, weight), x @ each.dequantise().T)
