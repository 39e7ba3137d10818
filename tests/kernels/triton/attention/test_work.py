"""The lists of splits and tiles against their definitions, exactly."""

from itertools import accumulate

import pytest
import torch

from kernels.triton.attention import work as attention_work
from kernels.triton.attention.lists import (
    MOST_SPLITS,
    SHORT_SPAN,
    SHORTEST_SPLIT,
    SHORTEST_TILE_SPLIT,
    SPLIT_PROGRAMS,
    queries_per_tile,
    reference_splits,
    reference_tiles,
    split_bound,
    split_length,
    tile_split_length,
)
from kernels.triton.attention.work import AttentionWork, AttentionWorkspace, WorkLimits
from tests.gpu.device import DEVICE

UNTOUCHED = -7
LENGTHS = [1, 255, 256, 257, 0, 16384, 16385, 40000, 131072, 131073]


def lay_out(requests: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(query_start_loc_R1, seq_lens_R) of (sequence length, query tokens)."""
    starts = [0, *accumulate(queries for _, queries in requests)]
    lengths = [length for length, _ in requests]
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)


def make_workspace(*, window: int | None = None, group_size: int = 3, scratch=(), **options):
    defaults = {
        "max_requests": 300,
        "max_prefill_tokens": 600,
        "max_seq_len": 200_000,
        "num_query_heads": group_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "max_decode_queries": 6,
        "sliding_window": window,
    }
    given = dict(zip(("partial_out", "partial_lse"), scratch, strict=False))
    return AttentionWorkspace(
        WorkLimits(**defaults | options), device=torch.device(DEVICE), num_programs=1, **given
    )


def plan(workspace, requests) -> AttentionWork:
    for entries in (workspace.work.splits_W8, workspace.work.tiles_W8):
        entries.fill_(UNTOUCHED)
    workspace.work.tile_splits_W8.fill_(UNTOUCHED)
    starts, lengths = lay_out(requests)
    most = workspace.limits.max_decode_queries
    prefills = [queries for _, queries in requests if queries > most]
    return workspace.plan(
        query_start_loc_R1=starts,
        seq_lens_R=lengths,
        has_decodes=len(prefills) < len(requests),
        num_prefills=len(prefills),
        num_prefill_tokens=sum(prefills),
    )


def assert_starts_with(entries_W8, expected):
    assert entries_W8[: len(expected)].tolist() == expected
    assert (entries_W8[len(expected) :] == UNTOUCHED).all()


@pytest.mark.parametrize("window", [None, 1, 256, 300, 5000, 20000])
@pytest.mark.parametrize("queries", [1, 6])
def test_splits_are_as_defined(window, queries):
    requests = [(length, min(length, queries)) for length in LENGTHS]
    work = plan(make_workspace(window=window), requests)
    expected = reference_splits(*lay_out(requests), 6, window)
    assert_starts_with(work.splits_W8, expected)
    assert int(work.counts_3[0]) == len(expected)
    counts = [sum(entry[0] == request for entry in expected) for request in range(len(requests))]
    assert max(counts) <= work.split_bound == split_bound(200_000, window, 6)


def test_splits_cover_each_visible_key_once():
    for window in (None, 7, 300, 20000):
        for length in (1, 256, 257, 16385, 50_001):
            for queries in (1, 5):
                starts, lengths = lay_out([(length, min(length, queries))])
                entries = reference_splits(starts, lengths, 5, window)
                first = 0 if window is None else max(0, length - min(length, queries) - window + 1)
                stops = [first, *(entry[2] for entry in entries)]
                assert [entry[1] for entry in entries] == stops[:-1]
                assert stops[-1] == length
                assert len(entries) <= split_bound(60_000, window, 5)


def test_a_split_is_long_enough_for_64_to_cover_the_span():
    for span in (0, 1, 128, 2048, 2049, 16384, 16385, 1_000_000, 100_000_000):
        length = split_length(span)
        assert length % SHORTEST_SPLIT == 0 and length * MOST_SPLITS >= span
        assert length <= 2 * SHORTEST_SPLIT or length * MOST_SPLITS < 2 * span
        assert (length == SHORTEST_SPLIT) == (span <= SHORT_SPAN)


def test_more_requests_than_a_program_counts_at_once_are_listed_in_order(monkeypatch):
    constants = attention_work.list_constants
    monkeypatch.setattr(
        attention_work,
        "list_constants",
        lambda limits, **has: constants(limits, **has) | {"BLOCK_R": 16},
    )
    requests = [(50 + 37 * row % 900, 1 + 8 * (row % 5 == 0)) for row in range(40)]
    work = plan(make_workspace(), requests)
    starts, lengths = lay_out(requests)
    assert_starts_with(work.splits_W8, reference_splits(starts, lengths, 6, None))
    tiles, _ = reference_tiles(starts, lengths, max_decode_queries=6, tile_queries=42)
    assert_starts_with(work.tiles_W8, tiles)


@pytest.mark.parametrize("group_size", [1, 3, 7, 8])
def test_tiles_are_as_defined(group_size):
    requests = [(9, 1), (300, 7), (1, 1), (300, 200), (63, 63), (0, 0), (129, 128)]
    work = plan(make_workspace(group_size=group_size), requests)
    expected, none = reference_tiles(
        *lay_out(requests),
        max_decode_queries=6,
        tile_queries=queries_per_tile(group_size, 1),
        splits_tiles=True,
    )
    assert not none
    assert work.counts_3[1:].tolist() == [len(expected), 0]
    assert len(expected) <= work.max_tiles
    assert_starts_with(work.tiles_W8, expected)


@pytest.mark.parametrize("window", [None, 5000])
@pytest.mark.parametrize(("kv_heads", "max_decode_queries"), [(1, 6), (8, 0), (3, 1), (128, 1)])
def test_few_queries_that_see_many_keys_have_them_split(window, kv_heads, max_decode_queries):
    requests = [(50_000, 50), (2000, 9), (2049, 9), (90, 80), (1024, 7), (1025, 7), (0, 0), (8, 1)]
    requests += [(131_072, 130), (9000, 129)]
    limits = {"num_kv_heads": kv_heads, "max_decode_queries": max_decode_queries}
    workspace = make_workspace(window=window, **limits | {"num_query_heads": 4 * kv_heads})
    work = plan(workspace, requests)
    tiles, splits = reference_tiles(
        *lay_out(requests),
        max_decode_queries=max_decode_queries,
        tile_queries=32,
        num_kv_heads=kv_heads,
        splits_tiles=True,
        sliding_window=window,
    )
    assert_starts_with(work.tiles_W8, tiles)
    if kv_heads == 128:
        assert work.max_split_prefills == work.tile_slots == 0 and not splits
        return
    assert_starts_with(work.tile_splits_W8, splits)
    assert work.counts_3[1:].tolist() == [len(tiles), len(splits) // work.tile_slots]
    assert len(splits) // work.tile_slots <= work.max_split_prefills
    for request, (length, queries) in enumerate(requests):
        own = [entry for entry in splits if entry[0] == request and entry[7]]
        assert len(own) <= SPLIT_PROGRAMS // kv_heads
        for _, _, _, position, start, stop, first, number in own:
            assert (stop - start) % 64 == start % 64 == 0 and stop - start >= SHORTEST_TILE_SPLIT
            assert splits[first][7] == number > 1
            assert position < length
        assert not own or max(entry[5] for entry in own) >= length > queries


def test_heads_above_256_elements_have_tiles_of_half_as_many_rows():
    requests = [(300, 200), (2049, 9), (5, 1)]
    work = plan(make_workspace(head_size=512, max_decode_queries=1), requests)
    tiles, splits = reference_tiles(
        *lay_out(requests),
        max_decode_queries=1,
        tile_queries=21,
        splits_tiles=True,
    )
    assert_starts_with(work.tiles_W8, tiles)
    assert_starts_with(work.tile_splits_W8, splits)
    assert len(tiles) == 10 and len(splits) == work.tile_slots
    with pytest.raises(ValueError, match="33 rows, the limit is 32"):
        make_workspace(head_size=512, max_decode_queries=11)


def test_a_prefill_of_many_tiles_is_not_split():
    assert tile_split_length(17, 100_000, 8) == 100_000
    assert tile_split_length(2, 100_000, 8) == 12_544
    assert tile_split_length(1, 1000, 1) == SHORTEST_TILE_SPLIT


def test_a_step_of_nothing_launches_nothing():
    work = plan(make_workspace(), [])
    assert work.max_tiles == 0 and (work.splits_W8 == UNTOUCHED).all()
    assert not work.has_decodes


def test_what_does_not_fit_is_refused():
    starts, lengths = lay_out([(5, 1), (9, 9)])
    workspace = make_workspace(max_requests=2, max_prefill_tokens=8)
    arguments = {"query_start_loc_R1": starts, "seq_lens_R": lengths}
    with pytest.raises(ValueError, match="9 prefill tokens"):
        workspace.plan(**arguments, num_prefills=1, num_prefill_tokens=9)
    with pytest.raises(ValueError, match="3 requests, the limit is 2"):
        workspace.plan(query_start_loc_R1=starts, seq_lens_R=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(TypeError, match="int32"):
        workspace.plan(query_start_loc_R1=starts.long(), seq_lens_R=lengths)
    with pytest.raises(ValueError, match="multiple"):
        make_workspace(num_query_heads=7, num_kv_heads=2)
    with pytest.raises(ValueError, match="as prefills"):
        make_workspace(max_decode_queries=22)
    with pytest.raises(ValueError, match="share the scratch"):
        make_workspace(scratch=(torch.empty(1), torch.empty(1)))


def test_two_groups_of_layers_can_share_scratch():
    large = make_workspace()
    small = make_workspace(
        max_seq_len=1000, scratch=(large.work.partial_out, large.work.partial_lse)
    )
    assert small.work.partial_out is large.work.partial_out
