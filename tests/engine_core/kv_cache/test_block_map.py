"""The pool as cells: whose each block is."""

import random

import pytest

from engine_core.kv_cache.block_map import block_map
from protocol.snapshots import CACHED, EMPTY, FIRST_PREFIX, FIRST_REQUEST, MAX_CELLS, MAX_PREFIXES


def owners_of(made):
    return memoryview(made.owners).cast("H").tolist()


def test_each_block_has_its_owner_and_shared_ones_their_prefix():
    made = block_map(
        9, {8}, [(FIRST_REQUEST, [1, 2, 3]), (FIRST_REQUEST + 1, [1, 2, 5]), (7, [6]), (9, [])]
    )
    a, b = FIRST_REQUEST, FIRST_REQUEST + 1
    assert owners_of(made) == [FIRST_PREFIX, FIRST_PREFIX, a, EMPTY, b, 7, EMPTY, CACHED, EMPTY]
    assert made.prefixes == [(2, 2)]
    assert list(made.levels) == [255, 255, 255, 0, 255, 255, 0, 255, 0]
    assert made.blocks_per_cell == 1


@pytest.mark.parametrize("num_blocks", [1, MAX_CELLS - 1, MAX_CELLS, MAX_CELLS + 1, 123_457])
def test_a_pool_of_any_size_has_a_bounded_number_of_cells_that_agree_with_its_blocks(num_blocks):
    draw = random.Random(num_blocks)
    ids = draw.sample(range(1, num_blocks + 1), num_blocks * 2 // 3)
    cached, held = set(ids[: len(ids) // 3]), ids[len(ids) // 3 :]
    made = block_map(
        num_blocks, cached, [(FIRST_REQUEST, held[::2]), (FIRST_REQUEST + 1, held[1::2])]
    )
    state = dict.fromkeys(cached, CACHED)
    state |= dict.fromkeys(held[::2], FIRST_REQUEST) | dict.fromkeys(held[1::2], FIRST_REQUEST + 1)
    per = made.blocks_per_cell
    cells = [
        [state.get(block, EMPTY) for block in range(first, first + per)]
        for first in range(1, num_blocks + 1, per)
    ]
    assert len(cells) <= MAX_CELLS
    assert owners_of(made) == [max(cell) for cell in cells]
    assert list(made.levels) == [sum(map(bool, cell)) * 255 // per for cell in cells]


def test_what_is_empty_behind_the_used_part_of_a_large_pool_is_left_out():
    for last, num_cells, per_cell in [
        (1, 256, 1), (256, 256, 1), (257, 512, 1), (2100, 1366, 3), (70_000, 2000, 50)
    ]:  # fmt: skip
        made = block_map(100_000, (), [(FIRST_REQUEST, [last])])
        found = owners_of(made)
        assert (len(found), made.blocks_per_cell) == (num_cells, per_cell)
        assert found.index(FIRST_REQUEST) == (last - 1) // per_cell


def test_so_many_prefixes_are_told_apart_and_the_rest_are_one():
    heads = range(1, 101)
    made = block_map(100, (), [(FIRST_REQUEST, [head]) for head in heads for _ in range(2)])
    assert len(made.prefixes) == MAX_PREFIXES
    assert max(owners_of(made)) == FIRST_PREFIX + MAX_PREFIXES - 1
    assert sum(blocks for _, blocks in made.prefixes) == 100


def test_a_model_without_a_cache_has_no_cells():
    assert owners_of(block_map(0, (), [])) == []


def test_an_untouched_pool_is_empty():
    assert set(owners_of(block_map(5, (), []))) == {EMPTY}
