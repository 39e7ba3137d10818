"""Mixture of experts of the torch backend against transformers' blocks and a plain loop."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    GptOssConfig,
    Lfm2MoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kernels.interface.weights import ExpertRouting
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


def make_gpt_oss(num_tokens, num_experts, width=36, features=22):
    """A layer and its biases; some gates and ups lie beyond the limits."""
    x, logits, gate_up, down = make_layer(num_tokens, num_experts, width, features)
    biases = torch.randn(num_experts, 2 * features), torch.randn(num_experts, width)
    return x * 5, logits, gate_up, down, "swiglu_oai", biases


def run(x, logits, gate_up, down, **options):
    return OPS.mixture_of_experts(
        x, logits, OPS.prepare_experts(gate_up, down), ExpertRouting(**options)
    )


def plain(x, logits, gate_up, down, *, top_k, renormalise):
    """A token and an expert at a time, in float64."""
    weights, ids = torch.softmax(logits.double(), dim=-1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True) if renormalise else weights
    return products(x, gate_up, down, ids, weights)


def products(x, gate_up, down, ids, weights):
    """Those of the chosen experts; without a gate where the first product is no wider."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    out = torch.zeros_like(x)
    for token, expert in [(token, each) for token, row in enumerate(ids) for each in row]:
        hidden = gate_up[expert] @ x[token]
        if gate_up.shape[1] == down.shape[2]:
            hidden = hidden.relu() ** 2
        else:
            gate, up = hidden.chunk(2)
            hidden = F.silu(gate) * up
        out[token] += weights[token][ids[token] == expert] * (down[expert] @ hidden)
    return out


ROUTERS = {
    "V3's": {"scores": "sigmoid", "num_groups": 4, "top_groups": 2, "epsilon": 1e-20, "scale": 2.5},
    "V3's, as they are": {"scores": "sigmoid", "renormalise": False, "top_k": 1},
    "V2's": {"num_groups": 4, "top_groups": 2, "renormalise": False, "scale": 16.0},
    "LFM2's": {"scores": "sigmoid", "epsilon": 1e-6, "scale": 1.5},
    "ERNIE's": {"epsilon": 1e-12},
}
"""Ways to choose 3 of 12 experts. All but V2's have a bias that chooses."""


def routing_of(name, num_experts=12):
    torch.manual_seed(len(name))
    bias = None if name == "V2's" else torch.randn(num_experts) * 0.3
    return ExpertRouting(**{"top_k": 3, "renormalise": True, "bias_X": bias, **ROUTERS[name]})


def their_router(name, routing):
    """transformers' module, and what it is called with beside the hidden states."""
    sizes = {
        "hidden_size": 160,
        "num_experts_per_tok": routing.top_k,
        "n_group": routing.num_groups,
        "topk_group": routing.top_groups,
        "norm_topk_prob": routing.renormalise,
        "routed_scaling_factor": routing.scale,
    }
    match name.split("'")[0]:
        case "V3":
            module = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, n_routed_experts=12))
            module.e_score_correction_bias.copy_(routing.bias_X)
        case "V2":
            topk_method = "group_limited_greedy"
            config = DeepseekV2Config(**sizes, num_experts=12, topk_method=topk_method)
            module = DeepseekV2TopkRouter(config)
        case "LFM2":
            module = Lfm2MoeTopKRouter(Lfm2MoeConfig(**sizes, num_experts=12))
            return module, (routing.bias_X,)
        case _:
            config = Ernie4_5_MoeConfig(hidden_size=160, moe_k=3, moe_num_experts=12)
            module = Ernie4_5_MoeTopKRouter(config)
            module.moe_statics.e_score_correction_bias.data[0] = routing.bias_X
    return module, ()


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_transformers(name):
    routing = routing_of(name)
    module, others = their_router(name, routing)
    torch.nn.init.normal_(module.weight, std=0.1)
    x = torch.randn(50, 160)
    logits, weights, ids = module(x, *others)
    expected = torch.zeros(50, 12).scatter_(1, ids, weights)
    mine_ids, mine = choose_experts(logits, routing)
    torch.testing.assert_close(torch.zeros(50, 12).scatter_(1, mine_ids, mine), expected)
    plain_ids, _ = choose_experts(logits, replace(routing, bias_X=None, num_groups=1, top_groups=1))
    assert not torch.equal(mine_ids.sort()[0], plain_ids.sort()[0])


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_without_a_gate_are_squares_of_relu(name):
    x, logits, gate_up, down = make_layer(17, 12)
    up, routing = gate_up[:, :22], routing_of(name)
    out = OPS.mixture_of_experts(x, logits, OPS.prepare_experts(up, down, "relu2"), routing)
    expected = products(x, up, down, *choose_experts(logits, routing))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_gpt_oss_experts_are_those_of_transformers():
    x, logits, gate_up, down, activation, biases = make_gpt_oss(50, 6)
    config = GptOssConfig(hidden_size=36, intermediate_size=22, num_local_experts=6)
    module = GptOssExperts(config)
    both = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2)  # gate 0, up 0, gate 1, ...
    module.gate_up_proj.copy_(both.transpose(1, 2))
    module.gate_up_proj_bias.copy_(torch.stack(biases[0].chunk(2, dim=1), dim=2).flatten(1))
    module.down_proj.copy_(down.transpose(1, 2))
    module.down_proj_bias.copy_(biases[1])
    routing = ExpertRouting(top_k=3, renormalise=True)
    prepared = OPS.prepare_experts(gate_up, down, activation, biases)
    out = OPS.mixture_of_experts(x, logits, prepared, routing)
    ids, weights = choose_experts(logits, routing)
    torch.testing.assert_close(out, module(x, ids, weights), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_groups": 5}, "1 of 5 groups of 12 experts"),
        ({"num_groups": 4, "top_groups": 5}, "5 of 4 groups of 12 experts"),
        ({"num_groups": 6}, r"top_k is 3; it must lie in \[1, 2\]"),
    ],
)
def test_groups_that_do_not_suit_the_experts_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        choose_experts(torch.zeros(1, 12), ExpertRouting(top_k=3, renormalise=True, **options))


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
    ids, weights = choose_experts(torch.zeros(2, 5), ExpertRouting(top_k=3, renormalise=False))
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
