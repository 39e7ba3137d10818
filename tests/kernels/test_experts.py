"""Mixture of experts of the torch backend against transformers' blocks and a plain loop."""

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kernels.interface.operations import ExpertRouting
from kernels.torch.linear import choose_experts
from kernels.torch.operations import TorchOperations

OPS = TorchOperations()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_layer(num_tokens, num_experts, width=36, features=22):
    torch.manual_seed(num_tokens + num_experts)
    return (
        torch.randn(num_tokens, width),
        torch.randn(num_tokens, num_experts),
        torch.randn(num_experts, 2 * features, width) / width**0.5,
        torch.randn(num_experts, width, features) / features**0.5,
    )


def run(x, logits, gate_up, down, **options):
    return OPS.mixture_of_experts(
        x, logits, OPS.prepare_experts(gate_up, down), ExpertRouting(**options)
    )


def plain(x, logits, gate_up, down, *, top_k, renormalise):
    """A token and an expert at a time, in float64."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    out = torch.zeros_like(x)
    for token, row in enumerate(torch.softmax(logits.double(), dim=-1)):
        weights, ids = row.topk(top_k)
        weights = weights / weights.sum() if renormalise else weights
        for weight, expert in zip(weights, ids, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 1, 1), (1, 8, 8), (2, 3, 2), (63, 4, 1), (65, 8, 2), (130, 60, 4), (3, 128, 8)],
)
def test_every_shape_equals_a_plain_loop(num_tokens, num_experts, top_k, renormalise):
    layer = make_layer(num_tokens, num_experts)
    result = run(*layer, top_k=top_k, renormalise=renormalise)
    expected = plain(*layer, top_k=top_k, renormalise=renormalise)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixtral_block_of_transformers(dtype):
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=48, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2
    )
    compare_with(MixtralSparseMoeBlock(config), dtype, 2, True, torch.float32)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qwen3_block_of_transformers(dtype, renormalise):
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        hidden_size=48,
        moe_intermediate_size=33,
        num_experts=12,
        num_experts_per_tok=4,
        norm_topk_prob=renormalise,
    )
    compare_with(Qwen3MoeSparseMoeBlock(config), dtype, 4, renormalise, dtype)


def compare_with(block, dtype, top_k, renormalise, weights_dtype):
    """As near to float64 as the block itself is in its dtype, but for a last rounding."""
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    block = block.to(dtype).eval()
    x = torch.randn(37, 48).to(dtype)
    experts = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
    with torch.no_grad():
        theirs = block(x[None])[0]
        logits = F.linear(x, block.gate.weight)
    mine = run(
        x, logits, *experts, top_k=top_k, renormalise=renormalise, weights_dtype=weights_dtype
    )
    assert mine.dtype == dtype
    exact = plain(x, logits, *experts, top_k=top_k, renormalise=renormalise)
    if dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    else:
        assert (mine - exact).abs().mean() <= 1.1 * (theirs - exact).abs().mean()


def test_weights_are_rounded_to_the_dtype_asked_for():
    x, _, gate_up, down = make_layer(1, 2)
    logits = torch.tensor([[0.3, 0.0]])
    experts = OPS.prepare_experts(gate_up, down)
    rounded = OPS.mixture_of_experts(
        x, logits, experts, ExpertRouting(top_k=1, renormalise=False, weights_dtype=torch.bfloat16)
    )
    one = OPS.mixture_of_experts(x, logits, experts, ExpertRouting(top_k=1, renormalise=True))
    weight = torch.softmax(logits[0], 0)[0].bfloat16().float()
    torch.testing.assert_close(rounded, one * weight)


def test_the_lower_id_wins_a_tie():
    ids, weights = choose_experts(torch.zeros(2, 5), 3, renormalise=False)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 0.2))


def test_all_tokens_of_one_expert_leave_the_others_out():
    x, _, gate_up, down = make_layer(70, 4)
    logits = torch.zeros(70, 4)
    logits[:, 2] = 50.0
    for unused in (0, 1, 3):  # a product with these would be seen
        gate_up[unused] = float("nan")
    result = run(x, logits, gate_up, down, top_k=1, renormalise=True)
    gate, up = (x @ gate_up[2].T).chunk(2, dim=1)
    torch.testing.assert_close(result, (F.silu(gate) * up) @ down[2].T, atol=1e-5, rtol=1e-5)


def test_no_tokens_give_no_rows():
    layer = make_layer(0, 4)
    assert run(*layer, top_k=2, renormalise=True).shape == (0, 36)


def test_arguments_are_left_as_they_were():
    layer = make_layer(9, 4)
    before = [tensor.clone() for tensor in layer]
    run(*layer, top_k=2, renormalise=True)
    assert all(map(torch.equal, before, layer))


def test_weights_that_do_not_fit_each_other_are_refused():
    _, _, gate_up, down = make_layer(1, 4)
    with pytest.raises(ValueError, match=r"\(4, 44, 36\).*\(3, 36, 22\).*\[X, 2F, E\]"):
        OPS.prepare_experts(gate_up, down[:3])
