"""Native norms, activations, rotation and embedding against torch in float64, and refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from paged_steps import keys_in_panels, make_cache, rotate

from kernels.cpu.operations import CpuOperations
from kernels.torch.operations import TorchOperations
from tests.kernels.cpu.instruction_sets import covering_sets

TORCH = TorchOperations()
SIZES = [1, 2, 15, 16, 17, 63, 64, 65, 576, 577]


@pytest.fixture
def ops(library, isa):
    return CpuOperations(library)


def exact_norm(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@covering_sets(size=SIZES, rows=[0, 1, 2, 63, 130])
def test_rms_norm_alone_and_after_the_sum(ops, rows, size):
    x, residual, weight = torch.randn(rows, size) * 3, torch.randn(rows, size), torch.randn(size)
    before = x.clone()
    normed = ops.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed.double(), exact_norm(x, weight, 1e-5), atol=2e-6, rtol=2e-6)
    assert torch.equal(x, before)
    total = x + residual
    normed, summed = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    expected = exact_norm(total, weight, 1e-5)
    torch.testing.assert_close(normed.double(), expected, atol=2e-6, rtol=2e-6)


def test_a_row_of_a_norm_has_the_same_bits_in_any_batch(ops):
    x, weight = torch.randn(200, 577), torch.randn(577)
    normed = ops.rms_norm(x, weight, 1e-6)
    for row in (0, 57, 199):
        assert torch.equal(ops.rms_norm(x[row : row + 1].clone(), weight, 1e-6)[0], normed[row])


@covering_sets(size=SIZES, rows=[0, 1, 63])
def test_layer_norm_alone_and_after_the_sum(ops, rows, size):
    torch.manual_seed(1)  # of two inputs that are nearly equal the difference is all rounding
    x, residual, pair = (
        torch.randn(rows, size) * 3 + 5,
        torch.randn(rows, size),
        torch.randn(2, size),
    )

    def exact(x):
        return torch.nn.functional.layer_norm(x.double(), (size,), *pair.double(), 1e-5)

    torch.testing.assert_close(
        ops.layer_norm(x, pair, 1e-5).double(), exact(x), atol=2e-5, rtol=2e-5
    )
    total = x + residual
    normed, summed = ops.add_layer_norm(x, residual, pair, 1e-5)
    assert torch.equal(summed, total)
    torch.testing.assert_close(normed.double(), exact(total), atol=2e-5, rtol=2e-5)
    if rows:
        assert torch.equal(ops.layer_norm(total[-1:], pair, 1e-5)[0], normed[-1])


@covering_sets(size=SIZES, rows=[1, 2, 63, 130])
def test_the_direction_of_the_mean(ops, rows, size):
    x = torch.randn(rows, size) * 3 + 1
    for kept in {size, size // 2 + 1}:
        expected = torch.nn.functional.normalize(x[:, :kept].double().mean(0), dim=0)
        for run in (ops, TORCH):
            found = run.mean_direction(x, kept)
            assert found.shape == (kept,)
            torch.testing.assert_close(
                torch.from_numpy(found).double(), expected, atol=1e-6, rtol=0
            )
    among = torch.cat([torch.randn(5, size), x, torch.randn(2, size)])
    same = ops.mean_direction(among[5 : 5 + rows], size)
    assert same.tobytes() == ops.mean_direction(x, size).tobytes()
    assert not ops.mean_direction(torch.zeros(rows, size), size).any()
    x[-1, -1] = float("nan")
    assert not np.isfinite(ops.mean_direction(x, size)).all()


def test_norms_of_views_and_of_more_dimensions(ops):
    wide, weight = torch.randn(6, 4, 24), torch.randn(24)
    for x in (wide, wide[:, 1], wide[:, 1:3], wide.transpose(0, 1), wide[0, 0]):
        expected = exact_norm(x, weight, 1e-6)
        torch.testing.assert_close(
            ops.rms_norm(x, weight, 1e-6).double(), expected, atol=2e-6, rtol=2e-6
        )


def test_a_sum_with_itself_and_a_sum_of_views_go_to_torch(ops):
    x, weight = torch.randn(3, 8), torch.randn(8)
    normed, total = ops.add_rms_norm(x, x, weight, 1e-6)
    torch.testing.assert_close(
        normed.double(), exact_norm(total, weight, 1e-6), atol=2e-6, rtol=2e-6
    )
    wide = torch.randn(3, 20)
    expected = wide[:, :8] + total
    torch.testing.assert_close(ops.add_rms_norm(wide[:, :8], total, weight, 1e-6)[1], expected)


@covering_sets(size=SIZES, rows=[0, 1, 3, 40])
def test_gated_activations(ops, rows, size):
    both = torch.randn(rows, 2 * size) * 8
    gate, up = both.double().chunk(2, dim=-1)
    silu = torch.nn.functional.silu(gate) * up
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(ops.silu_and_mul(both).double(), silu, atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(ops.gelu_tanh_and_mul(both).double(), gelu, atol=1e-6, rtol=4e-6)
    exact = torch.nn.functional.gelu(gate) * up
    torch.testing.assert_close(ops.gelu_and_mul(both).double(), exact, atol=2e-5, rtol=2e-6)


@covering_sets(size=SIZES, name=["silu", "gelu_tanh", "gelu", "relu"])
def test_activations_of_every_element(ops, name, size):
    x = torch.cat([torch.linspace(-9, 9, 3 * size - 1), torch.tensor([-1e30])]).view(3, size)
    expected = TORCH.activate(x.double(), name)
    alone = ops.activate(x[1:2].clone(), name)
    out = ops.activate(x, name)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=4e-6)
    assert torch.equal(out[1:2], alone)


def test_activations_of_extreme_values_are_those_of_torch(ops):
    extremes = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 89.0, -89.0, 1e4, -1e4, 1e30, -1e30]
    gate = torch.tensor([*extremes, torch.inf, torch.nan] + [1.0] * 5)
    both = torch.cat([gate, torch.ones_like(gate)])[None]
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        out, expected = getattr(ops, name)(both), getattr(TORCH, name)(both.clone())
        torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-30, rtol=2e-6)


def test_embedding_takes_rows(ops):
    weight = torch.randn(77, 33)
    for rows in (0, 1, 5, 300):
        ids = torch.randint(0, 77, (rows,))
        assert torch.equal(ops.embedding(ids, weight), weight[ids])


@pytest.mark.parametrize("token", [-1, 77])
def test_a_token_outside_the_vocabulary_is_refused(ops, token):
    with pytest.raises(ValueError, match=f"token id {token} at 1 is outside the vocabulary of 77"):
        ops.embedding(torch.tensor([3, token]), torch.randn(77, 8))


def rotary_case(num_tokens, *, heads=(6, 2), head_size=8, rotary_size=None, normed=False):
    """Arguments of rotary_and_cache but for the cache; tokens at random slots of 40."""
    width = (heads[0] + 2 * heads[1]) * head_size
    angles = torch.randn(10, (rotary_size or head_size) // 2)
    arguments = {
        "num_query_heads": heads[0],
        "head_size": head_size,
        "cos_sin_PD": torch.cat([angles.cos(), angles.sin()], dim=1),
        "positions_T": torch.randint(0, 10, (num_tokens,)),
        "slot_mapping_T": torch.randperm(160)[:num_tokens],
    }
    if normed:
        arguments["q_norm_weight_D"] = torch.randn(head_size)
        arguments["k_norm_weight_D"] = torch.randn(head_size)
        arguments["v_norm_weight_D"] = torch.randn(head_size)
        arguments["norm_eps"] = 1e-6
    return torch.randn(num_tokens, width), arguments


@covering_sets(
    normed=[False, True],
    rotary_size=[None, 4, 16],
    heads=[(6, 2), (1, 1), (9, 3)],
    num_tokens=[0, 1, 7, 130],
    block_size=[4, 32],
)
def test_rotation_and_cache_are_those_of_torch(
    ops, block_size, num_tokens, heads, rotary_size, normed
):
    head_size = 34
    qkv, arguments = rotary_case(
        num_tokens, heads=heads, head_size=head_size, rotary_size=rotary_size, normed=normed
    )
    shape = (160 // block_size, block_size, heads[1], head_size, qkv.dtype)
    own, reference = make_cache(ops, *shape), make_cache(TORCH, *shape)
    expected = rotate(TORCH.rotary_and_cache, qkv.clone(), reference, **arguments)
    rotated = rotate(ops.rotary_and_cache, qkv, own, **arguments)
    torch.testing.assert_close(rotated, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(own.keys, keys_in_panels(reference.keys), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(own.values, reference.values, atol=2e-6, rtol=2e-6)
    slots = arguments["slot_mapping_T"]
    for read, wanted in zip(
        ops.read_kv_cache(own, slots), TORCH.read_kv_cache(reference, slots), strict=True
    ):
        torch.testing.assert_close(read, wanted, atol=2e-6, rtol=2e-6)


def test_keys_written_as_they_are_lie_where_rotation_puts_them(ops):
    slots = torch.tensor([0, 15, 16, 31, 47, 90])
    rows = [torch.randn(6, 2, 34) for _ in "kv"]
    shape = 3, 32, 2, 34, torch.float32
    cache, reference = make_cache(ops, *shape), make_cache(TORCH, *shape)
    ops.write_kv_cache(*rows, slots, cache)
    TORCH.write_kv_cache(*rows, slots, reference)
    assert torch.equal(cache.keys, keys_in_panels(reference.keys))
    assert torch.equal(cache.values, reference.values)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("positions_T", -1, "position -1 of token 2 is outside the table of 10"),
        ("positions_T", 10, "position 10 of token 2 is outside the table of 10"),
        ("slot_mapping_T", -1, "slot -1 of token 2 is outside the cache of 160"),
        ("slot_mapping_T", 160, "slot 160 of token 2 is outside the cache of 160"),
    ],
)
def test_positions_and_slots_out_of_range_are_refused_and_nothing_is_written(
    ops, name, value, text
):
    qkv, arguments = rotary_case(5)
    arguments[name][2] = value
    cache = make_cache(ops, 40, 4, 2, 8, torch.float32)
    before = qkv.clone()
    with pytest.raises(ValueError, match=text):
        rotate(ops.rotary_and_cache, qkv, cache, **arguments)
    assert torch.equal(qkv, before) and not cache.keys.any() and not cache.values.any()


def test_tensors_that_do_not_fit_are_refused(ops):
    qkv, arguments = rotary_case(5)
    cache = make_cache(ops, 40, 4, 2, 8, torch.float32)
    with pytest.raises(ValueError, match=r"qkv is \(5, 79\)"):
        rotate(ops.rotary_and_cache, qkv[:, :79].contiguous(), cache, **arguments)
    with pytest.raises(ValueError, match=r"values torch.float64"):
        wrong = dataclasses.replace(cache, values=cache.values.double())
        rotate(ops.rotary_and_cache, qkv, wrong, **arguments)
    with pytest.raises(ValueError, match=r"positions is torch.int32"):
        wrong = {**arguments, "positions_T": arguments["positions_T"].int()}
        rotate(ops.rotary_and_cache, qkv, cache, **wrong)
    with pytest.raises(ValueError, match=r"angles of 10 elements for heads of 8"):
        rotate(ops.rotary_and_cache, qkv, cache, **{**arguments, "cos_sin_PD": torch.randn(10, 10)})
    with pytest.raises(ValueError, match=r"weight .* must be contiguous .* \(8,\)"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(7), 1e-6)
    with pytest.raises(ValueError, match=r"residual .* must be contiguous .* \(2, 8\)"):
        ops.add_rms_norm(torch.randn(2, 8), torch.randn(3, 8), torch.randn(8), 1e-6)
    with pytest.raises(ValueError, match=r"gate_up is \(2, 7\)"):
        ops.silu_and_mul(torch.randn(2, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_go_to_torch(ops, dtype):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((3, 8), (3, 8), (8,)))
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.silu_and_mul(x.clone()), TORCH.silu_and_mul(x.clone()))
    assert torch.equal(ops.gelu_tanh_and_mul(x.clone()), TORCH.gelu_tanh_and_mul(x.clone()))
    ids = torch.tensor([2, 0])
    assert torch.equal(ops.embedding(ids, x), x[ids])
    own = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(own[0], TORCH.add_rms_norm(x, residual, weight, 1e-5)[0])
