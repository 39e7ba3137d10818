"""The persistent batch and what is gathered from it, against a plain loop over tokens."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache import KVCacheGroupSpec, PoolIds
from engine_core.model_runner.cpu.input_batch import CPUInputBatch, gather_step_inputs

BLOCK_SIZE = 4
requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 29), st.integers(1, 30)), min_size=1, max_size=6
)


IDS = PoolIds([100, 50])
GROUPS = [KVCacheGroupSpec(), KVCacheGroupSpec(6), KVCacheGroupSpec(2, pool=1)]


def filled_batch(sizes):
    """Sequences of (tokens, computed, scheduled), clipped to make sense; random blocks."""
    groups = [SimpleNamespace(spec=spec) for spec in GROUPS]
    limits = {"max_num_seqs": 8, "max_model_len": 32, "block_size": BLOCK_SIZE}
    layout = SimpleNamespace(groups=groups)
    batch = CPUInputBatch(SimpleNamespace(**limits, layout=layout, block_ids=IDS))
    random = np.random.default_rng(0)
    facts = []
    for number, (num_tokens, computed, scheduled) in enumerate(sizes):
        computed = min(computed, num_tokens - 1)
        scheduled = min(scheduled, num_tokens - computed)
        tokens = random.integers(0, 1000, num_tokens).tolist()
        width = -(-num_tokens // BLOCK_SIZE)
        tables = tuple(random.permutation(IDS.stack(spec.pool))[:width].tolist() for spec in GROUPS)
        row = (number * 3 + 5) % 8
        batch.write_row(row, tokens, tables)
        facts.append((row, tokens, computed, scheduled, tables))
    return batch, facts


def gathered(batch, facts, **options):
    rows, _, computed, scheduled, _ = zip(*facts, strict=True)
    return gather_step_inputs(
        batch,
        rows=np.array(rows, np.int64),
        num_computed=np.array(computed, np.int32),
        num_scheduled=np.array(scheduled, np.int32),
        **options,
    )


@given(requests)
def test_gathering_equals_a_loop_over_tokens(sizes):
    batch, facts = filled_batch(sizes)
    inputs = gathered(batch, facts)
    token_ids, positions, slots = [], [], [[], [], []]
    sampled = []
    for index, (_, tokens, computed, scheduled, tables) in enumerate(facts):
        for position in range(computed, computed + scheduled):
            token_ids.append(tokens[position])
            positions.append(position)
            for spec, table, own in zip(GROUPS, tables, slots, strict=True):
                block = table[position // BLOCK_SIZE] - 100 * spec.pool
                own.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        if computed + scheduled == len(tokens):
            sampled.append(index)
        for spec, table, rows in zip(GROUPS, tables, inputs.block_tables_GRM, strict=True):
            used = -(-(computed + scheduled) // BLOCK_SIZE)
            in_pool = [block_id - 100 * spec.pool for block_id in table[:used]]
            assert rows[index, :used].tolist() == in_pool
    assert inputs.token_ids_T.tolist() == token_ids
    assert inputs.positions_T.tolist() == positions
    assert [mapping.tolist() for mapping in inputs.slot_mappings_GT] == slots
    assert inputs.sampled_R.tolist() == sampled
    counts = [fact[3] for fact in facts]
    assert np.diff(inputs.query_start_R1).tolist() == counts
    assert inputs.place_R.tolist() == list(range(len(facts)))
    assert counts[: inputs.num_decodes] == [1] * inputs.num_decodes
    assert inputs.num_decodes == len(facts) or counts[inputs.num_decodes] > 1


@given(requests)
def test_decodes_come_first_if_asked_for_and_nothing_else_changes(sizes):
    batch, facts = filled_batch(sizes)
    order = [i for i, fact in enumerate(facts) if fact[3] == 1]
    num_decodes = len(order)
    order += [i for i, fact in enumerate(facts) if fact[3] > 1]
    inputs = gathered(batch, facts, decodes_first=True)
    assert inputs.place_R.tolist() == order
    assert inputs.num_decodes == num_decodes
    expected = gathered(batch, [facts[i] for i in order])
    assert inputs.rows_R.tolist() == expected.rows_R.tolist()
    assert inputs.token_ids_T.tolist() == expected.token_ids_T.tolist()
    assert inputs.positions_T.tolist() == expected.positions_T.tolist()
    assert inputs.sampled_R.tolist() == expected.sampled_R.tolist()
    assert inputs.query_start_R1.tolist() == expected.query_start_R1.tolist()


def test_a_row_that_changes_hands_shows_the_new_sequence():
    batch, facts = filled_batch([(9, 0, 3)] * 3)
    row = facts[1][0]
    batch.write_row(row, [7, 8], ([1], [2], [103]))
    inputs = gathered(batch, [(row, [7, 8], 0, 2, None)])
    assert inputs.token_ids_T.tolist() == [7, 8]
    assert [table.tolist() for table in inputs.block_tables_GRM] == [[[1]], [[2]], [[3]]]
    assert inputs.sampled_R.tolist() == [0]


def test_blocks_are_written_where_they_belong_and_tokens_behind_the_last():
    batch, facts = filled_batch([(5, 4, 1), (2, 1, 1)])
    (row, tokens, *_, tables), (other, other_tokens, *_) = facts
    batch.write_blocks(row, 2, ([77], [88, 89], [111]))
    batch.write_blocks(row, 1, ([66], [], [110, 0]))
    batch.append_tokens(np.array([other, row]), np.array([2, 5]), np.array([43, 42]))
    assert batch.block_tables[0][row, :3].tolist() == [tables[0][0], 66, 77]
    assert batch.block_tables[1][row, :4].tolist() == [*tables[1], 88, 89]
    assert batch.block_tables[2][row, :3].tolist() == [tables[2][0] - 100, 10, 0]
    assert batch.token_ids[row, :6].tolist() == [*tokens, 42]
    assert batch.token_ids[other, :3].tolist() == [*other_tokens, 43]
    assert batch.num_tokens[[row, other]].tolist() == [6, 3]
