"""Grouping of layers: every layer has one place, and no two share one."""

from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_runner.config import plan_cache_layout


def test_one_kind_of_layer_is_one_group():
    layout = plan_cache_layout([None] * 30)
    assert len(layout.groups) == 1
    assert layout.num_tensors == 30


def test_gemma_3_270m_has_one_full_and_five_window_groups_of_three_layers():
    windows = [None if (layer + 1) % 6 == 0 else 512 for layer in range(18)]
    layout = plan_cache_layout(windows)
    assert [group.sliding_window for group in layout.groups] == [None, *[512] * 5]
    assert layout.num_tensors == 3
    assert layout.groups[0].layers == (5, 11, 17)


def test_nearly_equal_kinds_make_one_group_each():
    layout = plan_cache_layout([None] * 4 + [64] * 5)
    assert len(layout.groups) == 2
    assert layout.num_tensors == 5


@given(st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=40))
def test_each_layer_has_one_place_of_its_own_kind(windows):
    layout = plan_cache_layout(windows)
    places = [layout.place_of(layer) for layer in range(len(windows))]
    assert len(set(places)) == len(windows)
    for layer, (group, tensor) in enumerate(places):
        assert layout.groups[group].sliding_window == windows[layer]
        assert 0 <= tensor < layout.num_tensors
