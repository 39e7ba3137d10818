"""Experts of float8 and of 4 and 8 bits against the same numbers in float32, interpreted."""

import pytest
import torch

from kernels.interface.weights import ExpertRouting
from kernels.triton.fp8_rounding import reference_quantise_rows
from kernels.triton.linear import quantised_experts as module
from kernels.triton.linear.expert_routing import build_expert_tiles, route
from kernels.triton.linear.experts import mixture_of_experts
from kernels.triton.linear.fp8 import prepare_float8
from kernels.triton.linear.gguf_blocks import from_gguf
from kernels.triton.linear.quantised_experts import QuantisedExperts, grouped_quantised
from kernels.triton.linear.quantised_weights import dequantise, from_float8, quantise
from tests.gpu.checks.fp8_linear import SUM_ERROR
from tests.gpu.device import DEVICE
from tests.kernels.gguf_parts import random_part

X, TOP_K = 3, 2


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -99)

    monkeypatch.setattr(module.torch, "empty", poisoned_empty)


def packed(rows, num_inputs, *, num_bits, group_size, symmetric=False):
    weight = quantise(
        torch.randn(rows, num_inputs) / num_inputs**0.5,
        num_bits=num_bits,
        group_size=group_size,
        symmetric=symmetric,
    )
    return weight, dequantise(weight)


def float8(rows, num_inputs, *, grouped, widened=False, given=None):
    codes, scales = reference_quantise_rows(torch.randn(rows, num_inputs), grouped=grouped)
    wide = from_float8(codes, scales)
    return wide if widened else prepare_float8(codes, scales, given), dequantise(wide)


def float8_blocks(rows, num_inputs):
    codes, _ = reference_quantise_rows(torch.randn(rows, num_inputs), grouped=True)
    scales = torch.rand(rows // 128, num_inputs // 128).repeat_interleave(128, dim=0) / 400
    weight = prepare_float8(codes, scales)
    assert num_inputs == 128 or weight.rows_a_scale == 128
    return weight, dequantise(from_float8(codes, scales))


def blocks(rows, num_inputs, type_name):
    part = random_part(type_name, rows, num_inputs)
    weight = from_gguf(part.arrays["blocks"].to(DEVICE), rows, num_inputs, type_name)
    return weight, part.dequantise().to(DEVICE)


KINDS = {
    "int4 with offsets": lambda n, k: packed(n, k, num_bits=4, group_size=32),
    "int4": lambda n, k: packed(n, k, num_bits=4, group_size=128, symmetric=True),
    "int8": lambda n, k: packed(n, k, num_bits=8, group_size=16, symmetric=True),
    "levels": lambda n, k: blocks(n, k, "IQ4_NL" if k % 256 else "IQ2_XS"),
    "float8 by row, widened": lambda n, k: float8(n, k, grouped=False, widened=True),
    "float8 in groups, widened": lambda n, k: float8(n, k, grouped=True, widened=True),
    "float8 by row": lambda n, k: float8(n, k, grouped=False),
    "float8 in groups": lambda n, k: float8(n, k, grouped=True),
    "float8 in blocks": lambda n, k: float8_blocks(n, k),
    "float8, given": lambda n, k: float8(n, k, grouped=False, given=torch.tensor([0.01])),
}


def rounded(a, weight):
    if not hasattr(weight, "is_grouped"):
        return a
    q, scale = reference_quantise_rows(a, grouped=weight.is_grouped, given=weight.input_scale)
    return (q.float().unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
}


def reference(x, ids, weights, experts, gate_up, down):
    """In float32, with activations rounded where the weights ask for it."""
    out = torch.zeros(x.shape)
    x = rounded(x.float(), experts.gate_up)
    for expert in range(X):
        gate, up = (x @ gate_up.view(X, -1, x.shape[1])[expert].T).chunk(2, dim=1)
        h = rounded(ACTIVATIONS[experts.activation](gate) * up, experts.down)
        y = h @ down.view(X, x.shape[1], -1)[expert].T
        out += y * (weights * (ids == expert)).sum(dim=1, keepdim=True)
    return out


@pytest.mark.parametrize(("num_tokens", "tile_rows"), [(1, 16), (21, 16), (21, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_reference(kind, num_tokens, tile_rows):
    torch.manual_seed(num_tokens)
    width, features = 256, 128
    gate_up, wide_gate_up = KINDS[kind](X * 2 * features, width)
    down, wide_down = KINDS[kind](X * width, features)
    # Gemma 4's beside the others'
    experts = QuantisedExperts(X, gate_up, down, "gelu_tanh" if num_tokens == 1 else "silu")
    x, logits = torch.randn(num_tokens, width), torch.randn(num_tokens, X)
    routing = ExpertRouting(top_k=TOP_K, renormalise=True)
    result = mixture_of_experts(x, logits, experts, routing, tile_rows=tile_rows)
    ids, weights = route(logits, routing)
    expected = reference(x, ids, weights, experts, wide_gate_up, wide_down)
    # of float8, a last bit of a sum may move a number to its neighbour, and a GPU's have 14
    largest, mean = (1e-2, 1e-3) if DEVICE == "cpu" else (3e-2, 5e-3)
    if kind not in ("float8 by row", "float8 in groups", "float8 in blocks", "float8, given"):
        largest = 1e-5
    assert (result - expected).abs().max() <= largest * expected.abs().max()
    assert (result - expected).abs().mean() <= mean * expected.abs().mean()


@pytest.mark.parametrize("kind", ["int4", "float8 by row"])
def test_outputs_that_fill_no_block_leave_other_experts_alone(kind):
    torch.manual_seed(5)
    weight, wide = KINDS[kind](X * 2 * 40, 128)
    a = torch.randn(9, 128)
    tiles = build_expert_tiles(torch.tensor([[0], [1], [2]] * 3, dtype=torch.int32), X, 16)
    result = grouped_quantised(a, weight, X, tiles)
    w = wide.view(X, 80, 128)
    expected = torch.stack([w[p % 3] @ each for p, each in enumerate(rounded(a, weight))])
    tolerance = SUM_ERROR if kind == "float8 by row" else 1e-5
    assert (result - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_token_gets_the_same_bits_alone_and_in_a_crowd_at_fixed_tile_rows():
    torch.manual_seed(6)
    gate_up, _ = KINDS["float8 in groups"](X * 256, 256)
    experts = QuantisedExperts(X, gate_up, KINDS["int4"](X * 256, 128)[0])
    x, logits = torch.randn(20, 256), torch.randn(20, X)
    routing = ExpertRouting(top_k=TOP_K, renormalise=True)
    crowd = mixture_of_experts(x, logits, experts, routing, tile_rows=16)
    for token in (0, 19):
        one = slice(token, token + 1)
        alone = mixture_of_experts(x[one], logits[one], experts, routing, tile_rows=16)
        assert torch.equal(alone[0], crowd[token])


def test_a_wrong_number_of_rows_is_refused():
    weight, _ = KINDS["int4"](X * 40, 128)
    tiles = build_expert_tiles(torch.zeros(4, 1, dtype=torch.int32), X, 16)
    with pytest.raises(ValueError, match="3 rows of 1 pairs, but 4 were sorted"):
        grouped_quantised(torch.zeros(3, 128), weight, X, tiles)
