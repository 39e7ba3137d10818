"""Mixtures of experts against the torch backend, in the interpreter."""

import pytest
import torch

from kernels.interface.weights import ExpertRouting
from kernels.torch import linear as torch_experts
from kernels.triton.linear import experts as module
from kernels.triton.linear.expert_routing import build_expert_tiles
from kernels.triton.linear.experts import (
    choose_tile_rows,
    combine_experts,
    grouped_linear,
    invariant_tile_rows,
    mixture_of_experts,
    prepare_experts,
)
from tests.kernels.test_experts import make_gpt_oss


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -99)

    monkeypatch.setattr(module.torch, "empty", poisoned_empty)


def make_layer(num_tokens, num_experts, width=40, features=24, dtype=torch.float32):
    torch.manual_seed(num_tokens + num_experts)
    return (
        torch.randn(num_tokens, width).to(dtype),
        torch.randn(num_tokens, num_experts).to(dtype),
        (torch.randn(num_experts, 2 * features, width) / width**0.5).to(dtype),
        (torch.randn(num_experts, width, features) / features**0.5).to(dtype),
    )


def run(x, logits, *weights, tile_rows=None, batch_invariant=False, **options):
    routing = ExpertRouting(**{"top_k": 2, "renormalise": True, **options})
    if batch_invariant:
        tile_rows = invariant_tile_rows(x.dtype)
    experts = prepare_experts(*weights)
    return mixture_of_experts(x, logits, experts, routing, tile_rows=tile_rows)


def on_host(given):
    if isinstance(given, tuple):
        return tuple(map(on_host, given))
    return given.cpu() if isinstance(given, torch.Tensor) else given


def run_torch(x, logits, *weights, **options):
    routing = ExpertRouting(**{"top_k": 2, "renormalise": True, **options})
    with torch.device("cpu"):
        weights = [on_host(each) for each in weights]
        experts = torch_experts.prepare_experts(*weights)
        result = torch_experts.mixture_of_experts(x.cpu(), logits.cpu(), experts, routing)
    return result.to(x.device)


def assert_near(result, expected):
    assert result.dtype == expected.dtype
    tolerance = 1e-5 if result.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def test_experts_without_a_gate_are_those_of_torch():
    x, logits, gate_up, down = make_layer(17, 5)
    weights = gate_up[:, :24].contiguous(), down
    assert_near(run(x, logits, *weights, "relu2"), run_torch(x, logits, *weights, "relu2"))


def test_experts_of_gemma_are_those_of_torch():
    """GELU, and a factor on the weight of each expert."""
    options = {"scale_X": torch.rand(5) + 0.5}
    layer = *make_layer(17, 5), "gelu_tanh"
    assert_near(run(*layer, **options), run_torch(*layer, **options))


def test_experts_of_gpt_oss_are_those_of_torch():
    layer = make_gpt_oss(17, 5)
    torch.testing.assert_close(run(*layer), run_torch(*layer), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (1, 1, 1), (17, 3, 1), (65, 5, 4), (0, 4, 2)],
)
def test_every_shape_gives_what_torch_gives(num_tokens, num_experts, top_k, batch_invariant):
    layer = make_layer(num_tokens, num_experts)
    before = [tensor.clone() for tensor in layer]
    for renormalise in (False, True):
        options = {"top_k": top_k, "renormalise": renormalise}
        result = run(*layer, batch_invariant=batch_invariant, **options)
        assert_near(result, run_torch(*layer, **options))
    assert all(map(torch.equal, before, layer))


@pytest.mark.parametrize("tile_rows", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_tile_gives_what_torch_gives(dtype, tile_rows):
    """Of widths that fill no block, and weights rounded to the model's dtype."""
    layer, options = make_layer(37, 3, 72, 65, dtype), {"weights_dtype": dtype}
    assert_near(run(*layer, tile_rows=tile_rows, **options), run_torch(*layer, **options))


def test_experts_without_tokens_are_left_out():
    x, logits, gate_up, down = make_layer(40, 6)
    logits[:, [0, 3, 5]] = -50.0
    for unused in (0, 3, 5):
        gate_up[unused] = down[unused] = float("nan")
    result = run(x, logits, gate_up, down)
    assert result.isfinite().all()
    assert_near(result, run_torch(x, logits, gate_up, down))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_invariant_a_token_has_the_same_bits_whatever_runs_beside_it(dtype):
    """Numbers of tokens at which the fastest tiles would have 16, 64 and 128 rows."""
    x, logits, gate_up, down = make_layer(200, 2, width=32, features=16, dtype=dtype)
    options = {"top_k": 1, "batch_invariant": True}
    alone = run(x[:1], logits[:1], gate_up, down, **options)
    for number in (2, 17, 100, 200):
        crowd = run(x[:number], logits[:number], gate_up, down, **options)
        assert torch.equal(crowd[0], alone[0])
        last = slice(number - 1, number)
        assert torch.equal(run(x[last], logits[last], gate_up, down, **options)[0], crowd[-1])


def test_pairs_of_one_expert_fill_many_tiles():
    x, _, _, w_down = make_layer(35, 4)
    tiles = build_expert_tiles(torch.full((35, 1), 2, dtype=torch.int32), 4, 16)
    w = w_down.transpose(1, 2).contiguous()
    assert_near(grouped_linear(x, w, tiles), x @ w[2].T)


def test_rows_of_a_wider_tensor_are_read_in_place():
    x, *others = make_layer(5, 4)
    wide = torch.full((5, 50), float("nan"))
    wide[:, :40] = x
    assert torch.equal(run(wide[:, :40], *others), run(x, *others))


def test_the_sum_runs_in_the_order_of_rank():
    y = torch.tensor([[1e8], [1.0], [-1e8]])
    assert combine_experts(y, torch.ones(1, 3)).item() == 0.0


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


def test_tiles_grow_with_the_rows_of_an_expert():
    assert [choose_tile_rows(n, 8, 128, torch.bfloat16) for n in (1, 1024, 8192)] == [16, 64, 128]


def test_contiguous_weights_are_kept_and_not_copied():
    _, _, gate_up, down = make_layer(1, 3)
    experts = prepare_experts(gate_up, down)
    assert experts.gate_up_XNE.data_ptr() == gate_up.data_ptr()
    assert experts.down_XEF.data_ptr() == down.data_ptr()


def test_wrong_arguments_are_refused_by_name():
    x, logits, gate_up, down = make_layer(4, 4)
    with pytest.raises(ValueError, match=r"\[X, 2F, E\] and \[X, E, F\]"):
        run(x, logits, gate_up, down[:, :, :7])
    with pytest.raises(TypeError, match="give both in one of"):
        run(x, logits, gate_up, down.half())
    with pytest.raises(ValueError, match="router logits are"):
        run(x, logits[:3], gate_up, down)
    with pytest.raises(ValueError, match=r"expert weights is float32.*make it float16"):
        run(x.half(), logits, gate_up, down)
    with pytest.raises(ValueError, match="tile_rows is 32"):
        run(x, logits, gate_up, down, tile_rows=32)


def test_padding_of_a_bucket_reads_no_expert_and_changes_no_other_token():
    """What padding holds is whatever memory held, NaN too."""
    x, logits, gate_up, down = make_layer(8, 6)
    slots = torch.arange(8)
    slots[5:] = -1
    x[5:] = torch.nan
    alone = run(x[:5], logits[:5], gate_up, down, tile_rows=16)
    chosen = set(torch.topk(logits[:5], 2).indices.flatten().tolist())
    for expert in set(range(6)) - chosen:
        gate_up[expert], down[expert] = torch.nan, torch.nan
    experts, routing = prepare_experts(gate_up, down), ExpertRouting(top_k=2, renormalise=True)
    out = mixture_of_experts(x, logits, experts, routing, slots, tile_rows=16)
    assert torch.equal(out[:5], alone)
