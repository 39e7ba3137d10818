"""The lists of splits and tiles against their definitions, exactly."""

from itertools import accumulate

import pytest
import torch

from kernels.triton.attention_work import (
    ENTRY,
    MOST_SPLITS,
    SHORTEST_SPLIT,
    AttentionWork,
    AttentionWorkspace,
    list_splits_kernel,
    queries_per_tile,
    reference_splits,
    reference_tiles,
    split_bound,
    split_length,
)

UNTOUCHED = -7
LENGTHS = [1, 255, 256, 257, 0, 16384, 16385, 40000, 131072, 131073]


def lay_out(requests: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(query_start_loc_R1, seq_lens_R) of (sequence length, query tokens)."""
    starts = [0, *accumulate(queries for _, queries in requests)]
    lengths = [length for length, _ in requests]
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)


def make_workspace(*, window: int | None = None, group_size: int = 3, **options):
    defaults = {
        "device": torch.device("cpu"),
        "max_decodes": 300,
        "max_prefills": 8,
        "max_prefill_tokens": 600,
        "max_seq_len": 200_000,
        "num_query_heads": group_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "num_programs": 1,
        "max_decode_queries": 6,
        "sliding_window": window,
    }
    return AttentionWorkspace(**defaults | options)


def plan(workspace, requests, num_decodes) -> AttentionWork:
    workspace.work.splits_W8.fill_(UNTOUCHED)
    workspace.work.tiles_W8.fill_(UNTOUCHED)
    starts, lengths = lay_out(requests)
    return workspace.plan(
        query_start_loc_R1=starts,
        seq_lens_R=lengths,
        num_decodes=num_decodes,
        num_prefills=len(requests) - num_decodes,
        num_prefill_tokens=sum(queries for _, queries in requests[num_decodes:]),
    )


@pytest.mark.parametrize("window", [None, 1, 256, 300, 5000, 20000])
@pytest.mark.parametrize("queries", [1, 6])
def test_splits_are_as_defined(window, queries):
    requests = [(length, min(length, queries)) for length in LENGTHS]
    work = plan(make_workspace(window=window), requests, len(requests))
    expected = reference_splits(*lay_out(requests), len(requests), window)
    total = len(expected)
    assert work.splits_W8[:total].tolist() == expected
    assert (work.splits_W8[total:] == UNTOUCHED).all()
    counts = [sum(entry[0] == request for entry in expected) for request in range(len(requests))]
    assert work.first_split_R1[: len(requests) + 1].tolist() == [0, *accumulate(counts)]
    assert max(counts) <= work.split_bound == split_bound(200_000, window, 6)


def test_splits_cover_each_visible_key_once():
    for window in (None, 7, 300, 20000):
        for length in (1, 256, 257, 16385, 50_001):
            for queries in (1, 5):
                starts, lengths = lay_out([(length, min(length, queries))])
                entries = reference_splits(starts, lengths, 1, window)
                first = 0 if window is None else max(0, length - min(length, queries) - window + 1)
                stops = [first, *(entry[2] for entry in entries)]
                assert [entry[1] for entry in entries] == stops[:-1]
                assert stops[-1] == length
                assert len(entries) <= split_bound(60_000, window, 5)


def test_a_split_is_long_enough_for_64_to_cover_the_span():
    for span in (0, 1, 256, 16384, 16385, 1_000_000, 100_000_000):
        length = split_length(span)
        assert length % SHORTEST_SPLIT == 0 and length * MOST_SPLITS >= span
        assert length == SHORTEST_SPLIT or length * MOST_SPLITS < 2 * span


def test_more_requests_than_a_program_counts_at_once_are_listed_in_order():
    requests = [(1 + 37 * row % 900, 1) for row in range(290)]
    work = plan(make_workspace(), requests, 290)
    expected = reference_splits(*lay_out(requests), 290, None)
    assert work.splits_W8[: len(expected)].tolist() == expected
    assert int(work.first_split_R1[290]) == len(expected)


@pytest.mark.parametrize("group_size", [1, 3, 7, 8])
def test_tiles_are_as_defined(group_size):
    requests = [(9, 1), (300, 3), (1, 1), (300, 200), (63, 63), (0, 0), (129, 128)]
    work = plan(make_workspace(group_size=group_size), requests, 2)
    expected = reference_tiles(*lay_out(requests), 2, queries_per_tile(group_size))
    assert int(work.num_tiles_1) == len(expected) <= work.max_tiles
    assert work.tiles_W8[: len(expected)].tolist() == expected
    assert (work.tiles_W8[len(expected) :] == UNTOUCHED).all()


def test_splits_beyond_the_capacity_are_counted_but_not_written():
    starts, lengths = lay_out([(600, 1), (900, 1)])
    splits = torch.full((8, ENTRY), UNTOUCHED, dtype=torch.int32)
    first = torch.full((4,), UNTOUCHED, dtype=torch.int32)
    constants = {"SHORTEST": SHORTEST_SPLIT, "MOST": MOST_SPLITS, "BLOCK_R": 16, "BLOCK_W": 16}
    list_splits_kernel[(2,)](starts, lengths, splits, first, 2, 5, 1 << 30, **constants)
    assert splits[:5].tolist() == reference_splits(starts, lengths, 2, None)[:5]
    assert (splits[5:] == UNTOUCHED).all()
    assert first.tolist() == [0, 3, 7, UNTOUCHED]


def test_a_step_of_nothing_launches_nothing():
    work = plan(make_workspace(), [], 0)
    assert work.max_tiles == 0 and (work.splits_W8 == UNTOUCHED).all()


def test_what_does_not_fit_is_refused():
    starts, lengths = lay_out([(5, 1), (9, 9)])
    workspace = make_workspace(max_decodes=1, max_prefill_tokens=8)
    arguments = {"query_start_loc_R1": starts, "seq_lens_R": lengths}
    for message, counts in [
        ("2 decodes, the limit is 1", {"num_decodes": 2}),
        ("9 prefill tokens", {"num_decodes": 1, "num_prefills": 1, "num_prefill_tokens": 9}),
        ("sequence lengths", {"num_decodes": 1, "num_prefills": 2}),
    ]:
        with pytest.raises(ValueError, match=message):
            workspace.plan(**arguments | counts)
    with pytest.raises(TypeError, match="int32"):
        workspace.plan(query_start_loc_R1=starts.long(), seq_lens_R=lengths, num_decodes=1)
    with pytest.raises(ValueError, match="multiple"):
        make_workspace(num_query_heads=7, num_kv_heads=2)
    with pytest.raises(ValueError, match="as prefills"):
        make_workspace(max_decode_queries=22)
    with pytest.raises(ValueError, match="share the scratch"):
        make_workspace(partial_out=torch.empty(1), partial_lse=torch.empty(1))


def test_two_groups_of_layers_can_share_scratch():
    large = make_workspace()
    small = make_workspace(
        max_seq_len=1000, partial_out=large.work.partial_out, partial_lse=large.work.partial_lse
    )
    assert small.work.partial_out is large.work.partial_out
