"""Grouping of layers: every layer has a place of its own, or its source's."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_runner.config import plan_cache_layout
from engine_core.models.layer_cache import Latent, PagedKeys, State, paged_keys

A_LAYER = 16 * 2 * 2 * 8 * 4
"""Bytes a block of a layer of `paged_keys(2, 8, ...)`."""


def layout_of(layers):
    return plan_cache_layout(layers, 16, torch.float32)


def test_one_kind_of_layer_is_one_group():
    layout = layout_of(paged_keys(2, 8, [None] * 30))
    assert len(layout.groups) == 1
    assert layout.block_bytes == 30 * A_LAYER


def test_gemma_3_270m_has_one_full_and_five_window_groups_of_three_layers():
    windows = [None if (layer + 1) % 6 == 0 else 512 for layer in range(18)]
    layout = layout_of(paged_keys(2, 8, windows))
    assert [group.spec.reach for group in layout.groups] == [None, *[512] * 5]
    assert layout.block_bytes == 3 * A_LAYER
    assert layout.groups[0].layers == (5, 11, 17)


def test_nearly_equal_kinds_make_one_group_each():
    layout = layout_of(paged_keys(2, 8, [None] * 4 + [64] * 5))
    assert len(layout.groups) == 2
    assert layout.block_bytes == 5 * A_LAYER


def test_groups_are_of_equal_bytes_whatever_the_layers_shapes():
    """Full layers of half the heads' bytes: twice as many fill a block, and nothing is wasted."""
    wide, narrow = PagedKeys(2, 8, 8, window=64), PagedKeys(1, 8, 8)
    layout = layout_of([wide, wide, narrow] * 4)
    used = [sum(A_LAYER // (1 + (i % 3 == 2)) for i in g.layers) for g in layout.groups]
    assert used == [layout.block_bytes] * 5
    keys_of_192 = PagedKeys(1, 192, 128)
    assert layout_of([keys_of_192]).block_bytes == 16 * (192 + 128) * 4


def test_a_layer_that_shares_keys_takes_no_memory():
    source, reader = PagedKeys(2, 8, 8), PagedKeys(2, 8, 8, shares=0)
    layout = layout_of([source, reader, source])
    assert layout.groups[0].layers == (0, 2)
    assert layout.block_bytes == 2 * A_LAYER


def test_latent_vectors_and_states_are_planned_as_keys_are():
    latent = Latent(1, 576, 512)
    state = State(
        ((16, 64, 64), (3, 2048)), (torch.float32, torch.bfloat16), ((2048,),), (torch.float32,)
    )
    assert latent.block_bytes(16, torch.bfloat16) == 16 * 576 * 2
    state_bytes = 16 * 64 * 64 * 4 + 3 * 2048 * 2 + 16 * 2048 * 4
    assert state.block_bytes(16, torch.bfloat16) == state_bytes
    assert (state.reach, state.is_sparse) == (2, True)
    layout = plan_cache_layout([latent, state], 16, torch.bfloat16)
    assert [group.spec.is_sparse for group in layout.groups] == [False, True]
    assert [group.spec.pool for group in layout.groups] == [0, 1]
    assert layout.pool_bytes == (16 * 576 * 2, state_bytes)
    assert layout.num_bytes((10, 3)) == 10 * layout.pool_bytes[0] + 3 * layout.pool_bytes[1]
    assert layout.num_bytes(2) == 2 * sum(layout.pool_bytes)


@given(st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=60))
def test_kinds_of_equal_layers_share_a_pool(windows):
    assert len(layout_of(paged_keys(2, 8, windows)).pool_bytes) == 1


def test_kinds_that_leave_blocks_empty_have_pools_of_their_own():
    """One wide layer, and narrow ones that fill half of it."""
    wide, narrow = PagedKeys(8, 8, 8), PagedKeys(1, 8, 8, window=64)
    layout = layout_of([wide, *[narrow] * 4, wide])
    assert [group.layers for group in layout.groups] == [(0, 5), (1, 2, 3, 4)]
    assert layout.pool_bytes == (8 * A_LAYER, 2 * A_LAYER)
    assert layout.group_bytes == layout.pool_bytes
    assert len(layout_of([wide, *[narrow] * 5]).pool_bytes) == 1


def test_states_that_fill_blocks_of_keys_share_their_pool():
    state = State(((A_LAYER // 20,),), (torch.float32,), ((A_LAYER // 80,),), (torch.float32,))
    layout = layout_of([PagedKeys(2, 8, 8), state, state])
    assert [group.spec.pool for group in layout.groups] == [0, 0, 0]
    assert layout.pool_bytes == (A_LAYER,)


@given(st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=40), st.data())
def test_each_layer_has_a_place_of_its_own_among_its_kind(windows, data):
    heads = [data.draw(st.integers(1, 3)) for _ in windows]
    layers = [PagedKeys(k, 4, 6, window) for k, window in zip(heads, windows, strict=True)]
    layout = layout_of(layers)
    taken = set()
    for index, layer in enumerate(layers):
        group = layout.group_of(index)
        assert layout.groups[group].spec.reach == layer.window
        first = layout.offsets[index]
        assert first % 64 == 0
        own = {(group, at) for at in range(first, first + layer.block_bytes(16, torch.float32), 64)}
        assert not own & taken and max(own)[1] < layout.group_bytes[group]
        taken |= own
