"""The persistent batch and what is gathered from it, against a plain loop over tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_runner.persistent_batch import PersistentBatch
from engine_core.model_runner.step_inputs import gather_step_inputs

BLOCK_SIZE = 4
requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 29), st.integers(1, 30)), min_size=1, max_size=6
)


def filled_batch(sizes, num_groups=2):
    """Requests of (tokens, computed, scheduled), clipped to make sense; random blocks."""
    batch = PersistentBatch(
        max_num_rows=8, max_model_len=32, block_size=BLOCK_SIZE, num_groups=num_groups
    )
    random = np.random.default_rng(0)
    plan, facts = {}, {}
    for number, (num_tokens, computed, scheduled) in enumerate(sizes):
        computed = min(computed, num_tokens - 1)
        scheduled = min(scheduled, num_tokens - computed)
        tokens = random.integers(0, 1000, num_tokens).tolist()
        width = -(-num_tokens // BLOCK_SIZE)
        tables = tuple(random.permutation(100)[:width].tolist() for _ in range(num_groups))
        name = f"r{number}"
        batch.add(name, tokens, tables, computed)
        plan[name] = scheduled
        facts[name] = (tokens, computed, tables)
    return batch, plan, facts


@given(requests)
def test_gathering_equals_a_loop_over_tokens(sizes):
    batch, plan, facts = filled_batch(sizes)
    inputs = gather_step_inputs(batch, plan)
    token_ids, positions, slots = [], [], [[], []]
    sampled = []
    for index, (name, scheduled) in enumerate(plan.items()):
        tokens, computed, tables = facts[name]
        for position in range(computed, computed + scheduled):
            token_ids.append(tokens[position])
            positions.append(position)
            for group in range(2):
                block = tables[group][position // BLOCK_SIZE]
                slots[group].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        if computed + scheduled == len(tokens):
            sampled.append(index)
        for group in range(2):
            used = -(-(computed + scheduled) // BLOCK_SIZE)
            row = inputs.block_tables_GRM[group][index]
            assert row[:used].tolist() == list(tables[group][:used])
    assert inputs.token_ids_T.tolist() == token_ids
    assert inputs.positions_T.tolist() == positions
    assert [mapping.tolist() for mapping in inputs.slot_mappings_GT] == slots
    assert inputs.sampled_R.tolist() == sampled
    assert np.diff(inputs.query_start_R1).tolist() == list(plan.values())
    batch.check()


def test_rows_are_given_back_and_taken_again():
    batch, _, _ = filled_batch([(3, 0, 3)] * 6)
    row = batch.row_of["r2"]
    assert batch.remove("r2") == row
    assert batch.remove("r2") is None
    batch.check()
    assert batch.add("new", [7], ([1], [2]), 0) == row
    assert batch.num_blocks[:, row].tolist() == [1, 1]
    batch.check()


def test_blocks_and_tokens_are_appended_behind_what_is_there():
    batch, _, facts = filled_batch([(5, 4, 1)])
    row = batch.row_of["r0"]
    batch.append_blocks(row, ([77], [88, 89]))
    batch.append_token(row, 42)
    tokens, _, tables = facts["r0"]
    assert batch.block_tables[0][row, :3].tolist() == [*tables[0], 77]
    assert batch.block_tables[1][row, :4].tolist() == [*tables[1], 88, 89]
    assert batch.token_ids[row, :6].tolist() == [*tokens, 42]
    assert batch.num_tokens[row] == 6


def test_a_batch_has_no_more_rows_than_it_was_made_with():
    batch, _, _ = filled_batch([(1, 0, 1)] * 8)
    with pytest.raises(IndexError):
        batch.add("one too many", [1], ([1], [1]), 0)
