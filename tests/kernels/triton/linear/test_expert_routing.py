"""Routing and tiles against torch, in the interpreter."""

import pytest
import torch

from kernels.interface.weights import ExpertRouting
from kernels.torch import linear as by_torch
from kernels.triton.linear import expert_routing as moe_routing
from kernels.triton.linear.expert_routing import (
    build_expert_tiles,
    most_tiles,
    reference_expert_tiles,
)
from tests.kernels.test_experts import ROUTERS, routing_of


def route(logits, top_k, renormalise, slot_mapping_T=None, **options):
    routing = ExpertRouting(top_k=top_k, renormalise=renormalise, **options)
    return moe_routing.route(logits, routing, slot_mapping_T)


def choose_experts(logits, top_k, renormalise, **options):
    routing = ExpertRouting(top_k=top_k, renormalise=renormalise, **options)
    return by_torch.choose_experts(logits, routing)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN, or a number that no result may contain."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -99)

    monkeypatch.setattr(moe_routing.torch, "empty", poisoned_empty)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (63, 8, 2), (65, 60, 4), (5, 128, 8), (3, 1, 1), (2, 6, 6)],
)
def test_routing_is_softmax_then_top_k(num_tokens, num_experts, top_k, renormalise):
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts) * 3
    ids, weights = route(logits, top_k, renormalise)
    expected_ids, expected_weights = choose_experts(logits, top_k, renormalise)
    assert torch.equal(ids, expected_ids.int())
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_way_to_choose_is_that_of_torch(name):
    routing = routing_of(name)
    logits = torch.randn(65, 12)
    ids, weights = moe_routing.route(logits, routing)
    expected_ids, expected_weights = by_torch.choose_experts(logits, routing)
    assert torch.equal(ids, expected_ids.int())
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_the_lowest_id_wins_a_tie():
    ids, weights = route(torch.zeros(2, 7), 3, True)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_half_precision_logits_and_rounded_weights():
    logits = torch.randn(9, 16).half()
    ids, weights = route(logits, 4, True, weights_dtype=torch.float16)
    expected_ids, expected_weights = choose_experts(logits, 4, True)
    assert torch.equal(ids, expected_ids.int())
    torch.testing.assert_close(weights, expected_weights.half(), rtol=1e-3, atol=0)


def test_rows_of_a_wider_tensor_are_routed_in_place():
    wide = torch.randn(4, 20)
    assert torch.equal(route(wide[:, :8], 2, True)[0], route(wide[:, :8].clone(), 2, True)[0])


def test_ids_stay_in_range_for_logits_that_are_not_numbers():
    logits = torch.full((2, 6), float("nan"))
    logits[1] = -float("inf")
    ids, _ = route(logits, 2, False)
    assert ids.tolist() == [[0, 1]] * 2


def test_a_token_is_routed_alike_alone_and_in_a_crowd():
    logits = torch.randn(70, 24)
    ids, weights = route(logits, 5, True)
    for token in (0, 33, 69):
        alone_ids, alone_weights = route(logits[token : token + 1], 5, True)
        assert torch.equal(alone_ids[0], ids[token])
        assert torch.equal(alone_weights[0], weights[token])


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (17, 5, 1), (64, 3, 2), (300, 9, 8), (700, 128, 4)],
)
def test_tiles_are_the_stable_sort_of_the_pairs(num_tokens, num_experts, top_k, tile_rows):
    torch.manual_seed(num_experts)
    ids = torch.randint(0, num_experts, (num_tokens, top_k), dtype=torch.int32)
    tiles = build_expert_tiles(ids, num_experts, tile_rows)
    expected = reference_expert_tiles(ids, num_experts, tile_rows)
    assert torch.equal(tiles.sorted_pairs_P, expected.sorted_pairs_P)
    assert torch.equal(tiles.tile_expert_L, expected.tile_expert_L)
    needed = expected.tile_expert_L >= 0
    assert torch.equal(tiles.tile_start_L[needed], expected.tile_start_L[needed])
    assert torch.equal(tiles.tile_stop_L[needed], expected.tile_stop_L[needed])


@pytest.mark.parametrize("expert", [0, 3, 6])
def test_one_expert_may_take_everything(expert):
    ids = torch.full((33, 1), expert, dtype=torch.int32)
    tiles = build_expert_tiles(ids, 7, 16)
    assert tiles.tile_expert_L[:3].tolist() == [expert] * 3
    assert (tiles.tile_expert_L[3:] == -1).all()
    assert tiles.sorted_pairs_P.tolist() == list(range(33))


def test_the_worst_choice_of_experts_fills_the_list_of_tiles():
    # one full tile and one pair too many for each of 3 experts
    ids = torch.tensor([0] * 17 + [1] * 17 + [2] * 17, dtype=torch.int32)[:, None]
    assert most_tiles(51, 3, 16) == 6
    assert (build_expert_tiles(ids, 3, 16).tile_expert_L >= 0).all()


def test_no_tokens_need_no_tiles():
    ids, weights = route(torch.empty(0, 8), 2, True)
    assert ids.shape == weights.shape == (0, 2)
    assert build_expert_tiles(ids, 8, 16).tile_expert_L.numel() == 0


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="top_k is 9"):
        route(torch.randn(2, 8), 9, True)
    with pytest.raises(TypeError, match="floating"):
        route(torch.ones(2, 8, dtype=torch.int32), 2, True)
    with pytest.raises(ValueError, match="contiguous rows"):
        route(torch.randn(8, 2).T, 2, True)
    with pytest.raises(ValueError, match=r"expert_ids_TA is int64.*make it int32"):
        build_expert_tiles(torch.zeros(2, 2, dtype=torch.int64), 4, 16)
    with pytest.raises(ValueError, match="power of two"):
        build_expert_tiles(torch.zeros(2, 2, dtype=torch.int32), 4, 24)
    with pytest.raises(ValueError, match="2000 experts"):
        build_expert_tiles(torch.zeros(2, 2, dtype=torch.int32), 2000, 16)


def test_padding_has_no_expert_and_no_tile():
    logits, slots = torch.randn(16, 12), torch.arange(16)
    slots[9:] = -1
    ids, weights = route(logits, 2, True, slot_mapping_T=slots)
    alone, alone_weights = route(logits[:9], 2, True)
    assert (ids[9:] == -1).all()
    assert torch.equal(ids[:9], alone)
    assert torch.equal(weights[:9], alone_weights)
    tiles, expected = build_expert_tiles(ids, 12, 16), build_expert_tiles(alone, 12, 16)
    reference = reference_expert_tiles(ids, 12, 16)
    num_tiles = int((expected.tile_expert_L >= 0).sum())
    for got in (tiles, reference):
        assert torch.equal(got.sorted_pairs_P[: 9 * 2], expected.sorted_pairs_P)
        assert (got.tile_expert_L[num_tiles:] == -1).all()
        for part in ("tile_expert_L", "tile_start_L", "tile_stop_L"):
            assert torch.equal(getattr(got, part)[:num_tiles], getattr(expected, part)[:num_tiles])


def test_a_bucket_of_padding_alone_takes_no_expert():
    ids, _ = route(torch.randn(4, 3), 2, True, slot_mapping_T=torch.full((4,), -1))
    assert (build_expert_tiles(ids, 3, 16).tile_expert_L == -1).all()


def test_slots_of_another_step_are_refused():
    with pytest.raises(ValueError, match=r"slot_mapping_T is int64 \[3\]"):
        route(torch.randn(4, 3), 2, True, slot_mapping_T=torch.zeros(3).long())
