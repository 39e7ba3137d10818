"""Quantised weights of a model on a GPU's operations, in the interpreter: products and embeddings
against the numbers that the gguf package reads."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels.triton.linear import layers as module
from kernels.triton.linear import quantised as quantised_linear
from kernels.triton.linear.layers import QUANTISED_TYPES, TritonLinearWeight, TritonWeightParts
from kernels.triton.linear.quantised import choose_splits
from kernels.triton.linear.quantised_weights import dequantise as dequantise_weight
from kernels.triton.linear.quantised_weights import join_outputs, narrowed
from kernels.triton.linear.quantised_weights import quantise as quantise_weight
from kernels.triton.operations import TritonOperations
from tests.kernels.gguf_parts import random_part

CPU = torch.device("cpu")
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4")
BLOCK_TYPES += ("Q5_1", "Q5_K", "Q3_K", "Q2_K", "TQ2_0", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ2_S")
"""Each form of the layout, and each kind of levels that are not linear."""


def make(batch_invariant=False):
    return TritonOperations(CPU, quantised_types=QUANTISED_TYPES, batch_invariant=batch_invariant)


def assert_product(ops, weight, parts, bias=None, num_rows=5):
    x = torch.randn(num_rows, parts[0].shape[1])
    floats = [part if isinstance(part, torch.Tensor) else part.dequantise() for part in parts]
    expected = F.linear(x, torch.cat(floats), bias)
    assert (weight.num_outputs, weight.num_inputs) == (expected.shape[1], x.shape[1])
    torch.testing.assert_close(ops.linear(x, weight), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_blocks_are_multiplied_and_gathered_as_the_gguf_package_reads_them(type_name):
    ops = make()
    packing = ops.weight_packing(torch.float32)
    part = random_part(type_name, 45)
    weight = packing.pack("table", [part])
    ids = torch.tensor([44, 0, 7, 7])
    assert torch.equal(ops.embedding(ids, weight), part.dequantise()[ids])
    for num_rows in (1, 65):  # above 64 rows the weight is widened
        assert_product(ops, weight, [part], num_rows=num_rows)
    assert packing.bytes_by_format().keys() == {type_name}
    assert ops.weight_packing(torch.float32) is packing


def test_scales_that_float16_holds_take_no_more_than_in_the_file():
    for type_name, most in (("Q4_0", 18), ("Q4_1", 20), ("Q8_0", 34)):
        packing = make().weight_packing(torch.float16)
        packing.pack("one", [random_part(type_name, 6)])
        assert packing.bytes_by_format() == {type_name: 6 * 256 // 32 * most}


def test_parts_of_one_type_are_one_weight_in_their_own_order_with_their_biases(monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS_AT_ONCE", 5 * 256)  # some rows at a time
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    parts = [random_part("Q4_K", 24, order=order), random_part("Q4_K", 8)]
    bias = torch.randn(32)
    ops = make()
    weight = ops.weight_packing(torch.float32).pack("qk", parts, bias)
    assert not isinstance(weight, TritonWeightParts)
    assert_product(ops, weight, parts, bias)


def test_parts_of_unlike_types_stand_side_by_side():
    odd = replace(random_part("Q5_1", 9), type_name="Q9_9")  # of no type that runs: dequantised
    parts = [random_part("Q4_K", 24), random_part("Q6_K", 8), odd, torch.randn(3, 256)]
    bias = torch.randn(44)
    ops = make()
    packing = ops.weight_packing(torch.float32)
    weight = packing.pack("qkv", parts, bias)
    assert [part.num_outputs for part in weight.parts] == [24, 8, 12]
    assert packing.bytes_by_format().keys() == {"Q4_K", "Q6_K", "float32"}
    assert_product(ops, weight, parts, bias)


def test_a_floating_embedding_is_a_matrix_as_it_came():
    ops = make()
    table = torch.randn(20, 8)
    weight = ops.weight_packing(torch.float32).pack("table", [table])
    assert isinstance(weight, TritonLinearWeight)
    ids = torch.tensor([3, 19])
    assert torch.equal(ops.embedding(ids, weight), table[ids])


def test_parts_of_unequal_inputs_and_inputs_that_do_not_fit_are_refused_by_name():
    packing = make().weight_packing(torch.float32)
    with pytest.raises(ValueError, match=r"qk: parts of shapes \(4, 256\), \(4, 32\)"):
        packing.pack("qk", [random_part("Q8_0", 4), random_part("Q8_0", 4, 32)])


def test_without_types_that_run_nothing_is_packed():
    assert TritonOperations(CPU).weight_packing(torch.float32) is None
    ops = TritonOperations(CPU, quantised_types=frozenset({"Q9_9"}))
    assert ops.weight_packing(torch.float32) is None
    assert make().weight_packing(torch.float32) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_invariant_a_row_has_the_same_bits_beside_any_number_of_others(dtype, monkeypatch):
    monkeypatch.setattr(quantised_linear, "_ROWS_A_LAUNCH", 32)
    ops = make(batch_invariant=True)
    # of two types, the first wide enough to be cut into splits
    parts = [random_part("Q4_1", 33, 1024), random_part("Q6_K", 8, 1024)]
    weight = ops.weight_packing(dtype).pack("layer", parts)
    x = torch.randn(70, 1024).to(dtype)
    crowd = ops.linear(x, weight)
    expected = F.linear(
        x.float(), torch.cat([part.dequantise() for part in parts]).to(dtype).float()
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    assert (crowd.float() - expected).abs().max() <= tolerance * expected.abs().max()
    assert choose_splits(33, 512) > 1
    for rows in (slice(0, 1), slice(30, 37), slice(66, 70)):
        assert torch.equal(ops.linear(x[rows], weight), crowd[rows])


def test_joined_weights_with_and_without_offsets_keep_their_numbers():
    torch.manual_seed(0)
    for num_bits in (4, 8):
        pair = [
            quantise_weight(torch.randn(3, 64), num_bits=num_bits, group_size=32, symmetric=each)
            for each in (True, False)
        ]
        joined = join_outputs(pair)
        expected = torch.cat([dequantise_weight(each) for each in pair])
        torch.testing.assert_close(dequantise_weight(joined), expected, rtol=1e-6, atol=1e-6)
        assert narrowed(joined).scales_NG.dtype == torch.float32  # nothing is rounded
    with pytest.raises(ValueError, match="unequal inputs, bits or groups"):
        join_outputs([pair[0], quantise_weight(torch.randn(3, 64), num_bits=4, group_size=32)])
