"""The packed layout against what each format's own definition, or the gguf package, gives."""

import numpy as np
import pytest
import torch

from engine_core.model_files.gguf.header import SUPPORTED_TYPES
from kernels.triton.linear.gguf_blocks import GGUF_TYPES, from_gguf
from kernels.triton.linear.quantised_weights import (
    dequantise,
    from_awq,
    from_gptq,
    narrowed,
    pack_nibbles,
    quantise,
    unpack_nibbles,
)
from tests.covering import covering_pairs
from tests.kernels.gguf_parts import random_part


def test_packing_nibbles_can_be_undone():
    q = torch.randint(0, 16, (3, 96), dtype=torch.uint8)
    packed = pack_nibbles(q)
    assert packed.shape == (3, 48)
    assert packed[1, 17] == q[1, 33] | (q[1, 49] << 4)
    assert torch.equal(unpack_nibbles(packed), q)


@covering_pairs(symmetric=[True, False], group_size=[32, 64, 128], num_bits=[4, 8])
def test_rounding_is_off_by_half_a_step_at_most(num_bits, group_size, symmetric):
    torch.manual_seed(0)
    w = torch.randn(5, 384) + 0.3
    w[2] = 0.0
    w[3] = 0.7
    weight = quantise(w, num_bits=num_bits, group_size=group_size, symmetric=symmetric)
    error = (dequantise(weight) - w).view(5, -1, group_size).abs().amax(dim=2)
    assert (error <= weight.scales_NG * 0.5001 + 1e-6).all()
    assert (weight.num_inputs, weight.num_outputs) == (384, 5)
    assert (weight.offsets_NG is None) == symmetric


def pack_int32(values, num_bits):
    """[A, C] -> int32 [A, C * bits / 32], from the low bits up."""
    groups = values.numpy().astype(np.uint64).reshape(values.shape[0], -1, 32 // num_bits)
    shifts = np.arange(0, 32, num_bits, dtype=np.uint64)
    return torch.from_numpy((groups << shifts).sum(axis=2).astype(np.uint32).view(np.int32))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_gptq(num_bits, symmetric, act_order):
    torch.manual_seed(1)
    num_outputs, num_inputs, group_size = 24, 128, 32
    q_EN = torch.randint(0, 2**num_bits, (num_inputs, num_outputs))
    zeros_GN = torch.randint(1, 2**num_bits + 1, (4, num_outputs))
    if symmetric:
        zeros_GN[:] = 2 ** (num_bits - 1)
    scales_GN = torch.rand(4, num_outputs).half()
    g_idx = torch.arange(num_inputs) // group_size
    if act_order:
        g_idx = g_idx[torch.randperm(num_inputs)]
    weight = from_gptq(
        pack_int32(q_EN.T, num_bits).T.contiguous(),
        pack_int32(zeros_GN - 1, num_bits),
        scales_GN,
        g_idx.int(),
        num_bits=num_bits,
    )
    expected_EN = scales_GN.float()[g_idx] * (q_EN - zeros_GN[g_idx])
    torch.testing.assert_close(dequantise(weight), expected_EN.T, rtol=1e-5, atol=1e-4)
    assert (weight.offsets_NG is None) == symmetric
    assert (weight.input_order_E is None) == (not act_order)


def test_gptq_v2_stores_zeros_as_they_are():
    q_EN = torch.randint(0, 16, (64, 8))
    zeros_GN = torch.randint(0, 16, (2, 8))
    weight = from_gptq(
        pack_int32(q_EN.T, 4).T,
        pack_int32(zeros_GN, 4),
        torch.ones(2, 8),
        num_bits=4,
        zeros_are_less_one=False,
    )
    expected_EN = q_EN - zeros_GN.repeat_interleave(32, dim=0)
    assert torch.equal(dequantise(weight), expected_EN.T.float())


def test_gptq_with_unequal_groups_is_refused():
    g_idx = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be equal"):
        from_gptq(
            torch.zeros(8, 8, dtype=torch.int32),
            torch.zeros(2, 1, dtype=torch.int32),
            torch.ones(2, 8),
            g_idx,
            num_bits=4,
        )


def test_awq():
    torch.manual_seed(2)
    q_EN = torch.randint(0, 16, (128, 16))
    zeros_GN = torch.randint(0, 16, (2, 16))
    scales_GN = torch.rand(2, 16).half()
    # as AutoAWQ packs: nibble i of 8 holds column order[i]
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def pack(values):
        return pack_int32(values.view(-1, 2, 8)[:, :, order].reshape(-1, 16), 4)

    weight = from_awq(pack(q_EN), pack(zeros_GN), scales_GN)
    groups = torch.arange(128) // 64
    expected_EN = scales_GN.float()[groups] * (q_EN - zeros_GN[groups])
    torch.testing.assert_close(dequantise(weight), expected_EN.T, rtol=1e-5, atol=1e-5)
    assert weight.group_size == 64


@pytest.mark.parametrize("format_name", GGUF_TYPES)
def test_gguf_blocks_give_what_the_gguf_package_gives(format_name):
    part = random_part(format_name, 6, 1024)
    weight = narrowed(from_gguf(part.arrays["blocks"], 6, 1024, format_name))
    assert torch.equal(dequantise(weight), part.dequantise())
    arrays = [weight.packed_NJ, weight.scales_NG, weight.offsets_NG, weight.supers_NSC]
    num_bytes = sum(array.nbytes for array in arrays if array is not None) / (6 * 1024)
    wide = {"Q8_0": 1.0625, "Q5_0": 1.0625, "Q5_1": 1.125, "Q5_K": 1.1, "Q6_K": 1.08}
    assert num_bytes <= wide.get(format_name, 0.66)


def test_every_gguf_type_that_files_may_have_stays_quantised():
    floats = {"F64", "F32", "F16", "BF16"}
    assert {kind.name for kind in SUPPORTED_TYPES} - floats == {*GGUF_TYPES}


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="GGUF format Q8_K"):
        from_gguf(torch.zeros(292, dtype=torch.uint8), 1, 256, "Q8_K")
    with pytest.raises(ValueError, match="33 bytes of Q8_0"):
        from_gguf(torch.zeros(33, dtype=torch.uint8), 1, 32, "Q8_0")
    with pytest.raises(ValueError, match="3 bits"):
        quantise(torch.zeros(2, 64), num_bits=3, group_size=32)
    with pytest.raises(ValueError, match="groups of 48"):
        quantise(torch.zeros(2, 96), num_bits=4, group_size=48)
    with pytest.raises(ValueError, match="80 inputs"):
        quantise(torch.zeros(2, 80), num_bits=8, group_size=16)
