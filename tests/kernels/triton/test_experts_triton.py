"""Experts as the engine asks for them: Triton in the interpreter against the torch backend."""

import pytest
import torch

from kernels.interface.operations import ExpertRouting
from kernels.torch import linear as torch_experts
from kernels.triton.linear.experts import (
    choose_tile_rows,
    invariant_tile_rows,
    mixture_of_experts,
    prepare_experts,
)


def make_layer(num_tokens, num_experts, width=40, features=24, dtype=torch.float32):
    torch.manual_seed(num_tokens + num_experts)
    return (
        torch.randn(num_tokens, width).to(dtype),
        torch.randn(num_tokens, num_experts).to(dtype),
        (torch.randn(num_experts, 2 * features, width) / width**0.5).to(dtype),
        (torch.randn(num_experts, width, features) / features**0.5).to(dtype),
    )


def run(x, logits, gate_up, down, *, batch_invariant=False, **options):
    options = {"renormalise": True, "weights_dtype": torch.float32, **options}
    experts = prepare_experts(gate_up, down)
    tile_rows = invariant_tile_rows(x.dtype) if batch_invariant else None
    return mixture_of_experts(x, logits, experts, ExpertRouting(**options), tile_rows=tile_rows)


def run_torch(x, logits, gate_up, down, **options):
    options = {"renormalise": True, "weights_dtype": torch.float32, **options}
    with torch.device("cpu"):
        experts = torch_experts.prepare_experts(gate_up.cpu(), down.cpu())
        routing = ExpertRouting(**options)
        result = torch_experts.mixture_of_experts(x.cpu(), logits.cpu(), experts, routing)
    return result.to(x.device)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (1, 1, 1), (17, 3, 1), (65, 5, 4), (0, 4, 2)],
)
def test_every_shape_gives_what_torch_gives(num_tokens, num_experts, top_k, batch_invariant):
    layer = make_layer(num_tokens, num_experts)
    for renormalise in (False, True):
        options = {"top_k": top_k, "renormalise": renormalise}
        result = run(*layer, batch_invariant=batch_invariant, **options)
        torch.testing.assert_close(result, run_torch(*layer, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_half_precision_and_rounded_weights_give_what_torch_gives(batch_invariant):
    layer = make_layer(19, 4, dtype=torch.float16)
    options = {"top_k": 2, "renormalise": False, "weights_dtype": torch.float16}
    result = run(*layer, batch_invariant=batch_invariant, **options)
    assert result.dtype == torch.float16
    torch.testing.assert_close(result, run_torch(*layer, **options), atol=2e-3, rtol=2e-3)


def test_experts_without_tokens_are_left_out():
    x, logits, gate_up, down = make_layer(40, 6)
    logits[:, [0, 3, 5]] = -50.0
    for unused in (0, 3, 5):
        gate_up[unused] = down[unused] = float("nan")
    result = run(x, logits, gate_up, down, top_k=2)
    expected = run_torch(x, logits, gate_up, down, top_k=2)
    assert result.isfinite().all()
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_invariant_a_token_has_the_same_bits_whatever_runs_beside_it(dtype):
    """Numbers of tokens at which the fastest tiles would have 16, 64 and 128 rows."""
    x, logits, gate_up, down = make_layer(400, 2, width=32, features=16, dtype=dtype)
    alone = run(x[:1], logits[:1], gate_up, down, top_k=1, batch_invariant=True)
    for number in (2, 16, 17, 100, 400):
        crowd = run(x[:number], logits[:number], gate_up, down, top_k=1, batch_invariant=True)
        assert torch.equal(crowd[0], alone[0])
        last = slice(number - 1, number)
        assert torch.equal(
            run(x[last], logits[last], gate_up, down, top_k=1, batch_invariant=True)[0], crowd[-1]
        )


@pytest.mark.parametrize("largest", [1, 200, 257, 1537, 2048, 8191])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (3, 1), (60, 4)])
def test_steps_that_double_meet_every_tile_that_a_step_can_have(num_experts, top_k, largest):
    doubling = [size for size in (1 << power for power in range(14)) if size < largest]
    for dtype in (torch.float32, torch.bfloat16):
        met, all_of_them = (
            {choose_tile_rows(size, top_k, num_experts, dtype) for size in sizes}
            for sizes in ([*doubling, largest], range(1, largest + 1))
        )
        assert met == all_of_them


def test_the_invariant_tile_is_one_that_kernels_have():
    assert invariant_tile_rows(torch.float32) == 16
    assert invariant_tile_rows(torch.float16) == invariant_tile_rows(torch.bfloat16) == 64


def test_contiguous_weights_are_kept_and_not_copied():
    _, _, gate_up, down = make_layer(1, 3)
    experts = prepare_experts(gate_up, down)
    assert experts.num_experts == 3
    assert experts.gate_up_XNE.data_ptr() == gate_up.data_ptr()
    assert experts.down_XEF.data_ptr() == down.data_ptr()


def test_weights_that_do_not_fit_each_other_are_refused():
    _, _, gate_up, down = make_layer(1, 3)
    with pytest.raises(ValueError, match=r"\[X, 2F, E\] and \[X, E, F\]"):
        prepare_experts(gate_up, down[:, :, :7])
    with pytest.raises(TypeError, match="give both in one of"):
        prepare_experts(gate_up, down.half())
