"""The dense and elementwise operations against torch and transformers."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels.backends import UnsupportedDevice, select_operations
from kernels.interface.operations import RotaryParams
from kernels.torch.operations import TorchOperations
from tests.covering import covering_pairs
from tests.kernels.paged_steps import make_cache

OPS = TorchOperations()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@covering_pairs(dtype=DTYPES, rows=[0, 1, 2, 63, 130], bias=[False, True])
def test_linear_equals_torch(rows, bias, dtype):
    x, weight = torch.randn(rows, 37).to(dtype), torch.randn(51, 37).to(dtype)
    bias_N = torch.randn(51).to(dtype) if bias else None
    prepared = OPS.prepare_linear(weight, bias_N)
    assert (prepared.num_inputs, prepared.num_outputs) == (37, 51)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None)
    expected = expected + (0 if bias_N is None else bias_N.double())
    out = OPS.linear(x, prepared)
    assert out.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_round_where_llama_and_gemma_round(dtype):
    x = torch.randn(5, 24).to(dtype) * 3
    llama, gemma = LlamaRMSNorm(24, 1e-5), Gemma3RMSNorm(24, 1e-5)
    for module in (llama, gemma):
        module.weight.data.normal_()
        module.to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(OPS.rms_norm(x, llama.weight, 1e-5), llama(x))
        gemma_weight = 1.0 + gemma.weight.float()
        torch.testing.assert_close(OPS.rms_norm(x, gemma_weight, 1e-5), gemma(x))


def test_add_rms_norm_gives_norm_and_sum():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    expected_sum = residual + x
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, expected_sum)
    torch.testing.assert_close(normed, OPS.rms_norm(expected_sum, weight, 1e-6))


def test_gated_activations_equal_transformers():
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    both = torch.cat([gate, up], dim=1)
    torch.testing.assert_close(OPS.silu_and_mul(both.clone()), ACT2FN["silu"](gate) * up)
    torch.testing.assert_close(
        OPS.gelu_tanh_and_mul(both.clone()), ACT2FN["gelu_pytorch_tanh"](gate) * up
    )


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_and_cache_rotates_like_transformers_and_fills_the_slots(normed):
    num_tokens, num_heads, num_kv_heads, head_size = 6, 6, 2, 8
    q = torch.randn(num_tokens, num_heads, head_size)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_size)
    positions = torch.tensor([4, 0, 9, 9, 1, 2])
    slots = torch.tensor([8, 3, 11, 0, 5, 6])
    angles = torch.randn(10, head_size // 2)
    q_weight, k_weight = (torch.randn(head_size), torch.randn(head_size)) if normed else (None,) * 2
    cache = make_cache(OPS, 3, 4, num_kv_heads, head_size, torch.float32)
    rotated = OPS.rotary_and_cache(
        torch.cat([q, k, v], dim=1).flatten(1),
        positions,
        slots,
        cache,
        RotaryParams(
            num_query_heads=num_heads,
            head_size=head_size,
            cos_sin_PD=torch.cat([angles.cos(), angles.sin()], dim=1),
            q_norm_weight_D=q_weight,
            k_norm_weight_D=k_weight,
            norm_eps=1e-6,
        ),
    )
    if normed:
        q, k = OPS.rms_norm(q, q_weight, 1e-6), OPS.rms_norm(k, k_weight, 1e-6)
    angle = torch.cat([angles, angles], dim=1)[positions]
    expected_q, expected_k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    torch.testing.assert_close(rotated, expected_q)
    k_slots, v_slots = (part.flatten(0, 1) for part in cache.parts)
    torch.testing.assert_close(k_slots[slots], expected_k)
    torch.testing.assert_close(v_slots[slots], v)
    k_read, v_read = OPS.read_kv_cache(cache, slots)
    assert torch.equal(k_read, k_slots[slots]) and torch.equal(v_read, v)
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert not k_slots[untouched].any() and not v_slots[untouched].any()


def test_partial_rotation_leaves_the_rest_of_a_head():
    qkv = torch.randn(2, 3 * 8)
    cache = make_cache(OPS, 1, 4, 1, 8, torch.float32)
    angles = torch.randn(3, 2)
    rotated = OPS.rotary_and_cache(
        qkv.clone(),
        torch.tensor([1, 2]),
        torch.tensor([0, 1]),
        cache,
        RotaryParams(
            num_query_heads=1,
            head_size=8,
            cos_sin_PD=torch.cat([angles.cos(), angles.sin()], dim=1),
        ),
    )
    torch.testing.assert_close(rotated[:, 0, 4:], qkv[:, 4:8])
    assert not torch.allclose(rotated[:, 0, :4], qkv[:, :4])


def test_unknown_device_is_refused_by_name():
    with pytest.raises(UnsupportedDevice, match="meta"):
        select_operations("meta")
