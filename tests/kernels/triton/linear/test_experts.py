"""Grouped products against transformers' own blocks and the reference, in the interpreter."""

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kernels.interface.operations import ExpertRouting
from kernels.triton.linear import experts as moe_linear
from kernels.triton.linear.expert_routing import build_expert_tiles, reference_route
from kernels.triton.linear.experts import (
    TritonExpertWeights,
    choose_tile_rows,
    combine_experts,
    grouped_linear,
    mixture_of_experts,
    reference_mixture_of_experts,
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -99)

    monkeypatch.setattr(moe_linear.torch, "empty", poisoned_empty)


def make_layer(num_tokens, num_experts, width, features, dtype=torch.float32):
    torch.manual_seed(num_tokens + width)
    x = torch.randn(num_tokens, width).to(dtype)
    logits = torch.randn(num_tokens, num_experts)
    w_gate_up = (torch.randn(num_experts, 2 * features, width) / width**0.5).to(dtype)
    w_down = (torch.randn(num_experts, width, features) / features**0.5).to(dtype)
    return x, logits, w_gate_up, w_down


def run(x, logits, *weights, top_k=2, renormalise=True, tile_rows=None):
    routing = ExpertRouting(top_k=top_k, renormalise=renormalise)
    experts = TritonExpertWeights(*weights)
    return mixture_of_experts(x, logits, experts, routing, tile_rows=tile_rows)


def assert_near(result, expected, tolerance):
    assert result.isfinite().all()
    scale = expected.abs().max()
    assert (result.float() - expected.float()).abs().max() <= tolerance * scale


def run_block(block, x):
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    with torch.no_grad():
        return block(x[None])[0]


@pytest.mark.parametrize("num_tokens", [1, 19])
def test_mixtral_block_of_transformers(num_tokens):
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=48, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2
    )
    block = MixtralSparseMoeBlock(config).eval()
    x = torch.randn(num_tokens, 48)
    expected = run_block(block, x)
    with torch.no_grad():
        result = run(
            x,
            x @ block.gate.weight.T,
            block.experts.gate_up_proj,
            block.experts.down_proj,
            top_k=2,
            renormalise=True,
        )
    assert_near(result, expected, 1e-5)


@pytest.mark.parametrize("renormalise", [False, True])
def test_qwen3_block_of_transformers(renormalise):
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=33,
        num_experts=12,
        num_experts_per_tok=4,
        norm_topk_prob=renormalise,
    )
    block = Qwen3MoeSparseMoeBlock(config).eval()
    x = torch.randn(11, 64)
    expected = run_block(block, x)
    with torch.no_grad():
        result = run(
            x,
            x @ block.gate.weight.T,
            block.experts.gate_up_proj,
            block.experts.down_proj,
            top_k=4,
            renormalise=renormalise,
        )
    assert_near(result, expected, 1e-5)


@pytest.mark.parametrize("tile_rows", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_tile_gives_the_reference(dtype, tile_rows):
    x, logits, w_gate_up, w_down = make_layer(37, 3, 72, 65, dtype)
    result = run(x, logits, w_gate_up, w_down, tile_rows=tile_rows)
    ids, weights = reference_route(logits, 2, True)
    experts = TritonExpertWeights(w_gate_up, w_down)
    expected = reference_mixture_of_experts(x, ids, weights, experts)
    assert result.dtype == dtype
    assert_near(result, expected, 1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_token_gets_the_same_bits_alone_and_in_a_crowd_at_fixed_tile_rows(dtype):
    x, logits, w_gate_up, w_down = make_layer(50, 3, 64, 64, dtype)
    crowd = run(x, logits, w_gate_up, w_down, tile_rows=16)
    for token in (0, 17, 49):
        one = slice(token, token + 1)
        alone = run(x[one], logits[one], w_gate_up, w_down, tile_rows=16)
        assert torch.equal(alone[0], crowd[token])


def test_pairs_of_one_expert_fill_many_tiles():
    x, _, _, w_down = make_layer(35, 4, 40, 24)
    tiles = build_expert_tiles(torch.full((35, 1), 2, dtype=torch.int32), 4, 16)
    w = w_down.transpose(1, 2).contiguous()
    assert_near(grouped_linear(x, w, tiles), x @ w[2].T, 1e-5)


def test_rows_of_a_wider_tensor_are_read_in_place():
    x, logits, w_gate_up, w_down = make_layer(5, 4, 32, 16)
    wide = torch.full((5, 50), float("nan"))
    wide[:, :32] = x
    result = run(wide[:, :32], logits, w_gate_up, w_down)
    assert torch.equal(result, run(x, logits, w_gate_up, w_down))


def test_the_sum_runs_in_the_order_of_rank():
    y = torch.tensor([[1e8], [1.0], [-1e8]])
    assert combine_experts(y, torch.ones(1, 3)).item() == 0.0


def test_no_tokens_give_no_rows():
    x, logits, w_gate_up, w_down = make_layer(0, 4, 32, 16)
    assert run(x, logits, w_gate_up, w_down).shape == (0, 32)


def test_arguments_are_left_as_they_were():
    layer = make_layer(9, 4, 32, 16)
    before = [tensor.clone() for tensor in layer]
    run(*layer)
    assert all(map(torch.equal, before, layer))


def test_tiles_grow_with_the_rows_of_an_expert():
    assert choose_tile_rows(1, 8, 128, torch.bfloat16) == 16
    assert choose_tile_rows(1024, 8, 128, torch.bfloat16) == 64
    assert choose_tile_rows(8192, 8, 128, torch.bfloat16) == 128


def test_wrong_arguments_are_refused_by_name():
    x, logits, w_gate_up, w_down = make_layer(4, 4, 32, 16)
    with pytest.raises(ValueError, match=r"\[X, E, F\]"):
        run(x, logits, w_gate_up, w_down[:, :, :8].contiguous())
    with pytest.raises(ValueError, match="router logits are"):
        run(x, logits[:3], w_gate_up, w_down)
    with pytest.raises(ValueError, match=r"expert weights is float32.*make it float16"):
        run(x.half(), logits, w_gate_up, w_down)
    with pytest.raises(ValueError, match="tile_rows is 32"):
        run(x, logits, w_gate_up, w_down, tile_rows=32)


def test_padding_of_a_bucket_reads_no_expert_and_changes_no_other_token():
    """What padding holds is whatever memory held, NaN too."""
    x, logits, gate_up, down = make_layer(8, 6, 32, 16)
    slots = torch.arange(8)
    slots[5:] = -1
    x[5:] = torch.nan
    alone = run(x[:5], logits[:5], gate_up, down, tile_rows=16)
    chosen = set(torch.topk(logits[:5], 2).indices.flatten().tolist())
    for expert in set(range(6)) - chosen:
        gate_up[expert], down[expert] = torch.nan, torch.nan
    experts, routing = TritonExpertWeights(gate_up, down), ExpertRouting(top_k=2, renormalise=True)
    out = mixture_of_experts(x, logits, experts, routing, slots, tile_rows=16)
    assert torch.equal(out[:5], alone)
