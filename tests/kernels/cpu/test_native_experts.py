"""Mixture of experts in the native library against a plain loop in float64, and torch's."""

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import ExpertRouting
from kernels.torch.operations import TorchOperations
from tests.kernels.test_experts import make_layer, plain


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 1, 1), (1, 8, 8), (2, 3, 2), (63, 4, 1), (130, 60, 4), (3, 128, 8)],
)
def test_every_shape_equals_a_plain_loop(library, isa, num_tokens, num_experts, top_k, renormalise):
    ops = CpuOperations(library)
    x, logits, gate_up, down = make_layer(num_tokens, num_experts)
    routing = ExpertRouting(top_k=top_k, renormalise=renormalise)
    out = ops.mixture_of_experts(x, logits, ops.prepare_experts(gate_up, down), routing)
    expected = plain(x, logits, gate_up, down, top_k=top_k, renormalise=renormalise)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_alone(library, isa, weights):
    ops = CpuOperations(library, linear_weights=weights)
    x, logits, gate_up, down = make_layer(150, 12, width=100, features=70)
    experts = ops.prepare_experts(gate_up, down)
    routing = ExpertRouting(top_k=3, renormalise=True)
    out = ops.mixture_of_experts(x, logits, experts, routing)
    for start, stop in ((0, 1), (70, 71), (149, 150), (20, 60)):
        rows = slice(start, stop)
        alone = ops.mixture_of_experts(x[rows].clone(), logits[rows].clone(), experts, routing)
        assert torch.equal(alone, out[rows])


def test_experts_that_are_elsewhere_add_nothing(library):
    ops = CpuOperations(library)
    x, logits, gate_up, down = make_layer(40, 6)
    whole = ops.mixture_of_experts(
        x,
        logits,
        ops.prepare_experts(gate_up, down),
        ExpertRouting(top_k=2, renormalise=True),
    )
    parts = []
    for here in (slice(0, 1), slice(1, 4), slice(4, 6)):
        routing = ExpertRouting(top_k=2, renormalise=True, first_expert=here.start)
        experts = ops.prepare_experts(gate_up[here], down[here])
        parts.append(ops.mixture_of_experts(x, logits, experts, routing))
        torch_ops = TorchOperations()
        theirs = torch_ops.prepare_experts(gate_up[here], down[here])
        torch.testing.assert_close(
            parts[-1],
            torch_ops.mixture_of_experts(x, logits, theirs, routing),
            atol=1e-5,
            rtol=1e-5,
        )
    assert any(bool((part == 0).all(dim=1).any()) for part in parts)
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-5)


def test_the_lower_id_wins_a_tie_and_a_row_of_nan_stays_in_its_row(library):
    ops = CpuOperations(library)
    x, logits, gate_up, down = make_layer(3, 5)
    logits[:] = 0
    logits[1] = float("nan")
    routing = ExpertRouting(top_k=3, renormalise=False)
    out = ops.mixture_of_experts(x, logits, ops.prepare_experts(gate_up, down), routing)
    assert out[1].isnan().all()
    for row in (0, 2):
        first = plain(x[row : row + 1], logits[:1, :3], gate_up, down, top_k=3, renormalise=True)
        torch.testing.assert_close(out[row].double(), first[0] * 0.6, atol=1e-5, rtol=1e-5)


def test_no_tokens_give_no_rows(library):
    ops = CpuOperations(library)
    x, logits, gate_up, down = make_layer(0, 4)
    routing = ExpertRouting(top_k=2, renormalise=True)
    experts = ops.prepare_experts(gate_up, down)
    assert ops.mixture_of_experts(x, logits, experts, routing).shape == (0, 36)


def test_what_does_not_fit_is_refused(library):
    ops = CpuOperations(library)
    x, logits, gate_up, down = make_layer(2, 4)
    experts = ops.prepare_experts(gate_up, down)
    for wrong, text in (
        (ExpertRouting(top_k=5, renormalise=True), "5 experts a token of 4"),
        (ExpertRouting(top_k=1, renormalise=True, first_expert=1), "experts 1 to 5 of 4"),
        (ExpertRouting(top_k=1, renormalise=True, weights_dtype=torch.bfloat16), "bfloat16"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.mixture_of_experts(x, logits, experts, wrong)
    with pytest.raises(ValueError, match=r"x is .* must be contiguous"):
        routing = ExpertRouting(top_k=1, renormalise=True)
        ops.mixture_of_experts(x[:, :9], logits, experts, routing)
    with pytest.raises(ValueError, match=r"\(4, 44, 36\).*\(3, 36, 22\).*\[X, 2F, E\]"):
        ops.prepare_experts(gate_up, down[:3])
