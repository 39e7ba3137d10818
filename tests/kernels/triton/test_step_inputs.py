"""Steps made on the device against the runner's own, in Triton's interpreter."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine_core.model_runner.cpu.input_batch import (
    CPUInputBatch,
    StepInputs,
    gather_step_inputs,
)
from kernels.interface.step_inputs import (
    MOST_IDS,
    TOKEN_TABLE,
    DeviceRows,
    PackedLayout,
    RowUpdate,
    StepTensors,
    pack_step,
)
from kernels.triton.step_inputs import append_sampled, apply_row_updates, prepare_step

NUM_ROWS, MAX_LEN, S, G = 9, 2100, 16, 2
SIZES = SimpleNamespace(max_num_seqs=NUM_ROWS, max_model_len=MAX_LEN, block_size=S, num_groups=G)
CPU = torch.device("cpu")
LAYOUT = PackedLayout(capacity=11)

STEPS = [  # computed, scheduled: decodes, prefills, chunks, ends on and beside a boundary
    ([5], [1]),
    ([15, 16, 17], [1, 1, 1]),
    ([0], [63]),
    ([0, 31, 0, 7], [16, 1, 17, 9]),
    ([64, 0, 2099, 3], [300, 15, 1, 1]),
    ([1, 1000], [1023, 1025]),
]


def _filled() -> tuple[CPUInputBatch, DeviceRows]:
    """The same random rows on both sides."""
    generator = np.random.default_rng(0)
    batch = CPUInputBatch(SIZES)
    rows = DeviceRows.allocate(
        num_rows=NUM_ROWS, max_model_len=MAX_LEN, block_size=S, num_groups=G, device=CPU
    )
    batch.token_ids[:] = generator.integers(1, 30000, batch.token_ids.shape)
    rows.token_ids.copy_(torch.from_numpy(batch.token_ids))
    for group, table in enumerate(batch.block_tables):
        table[:] = generator.integers(1, 2**31 // S * 4, table.shape)  # slots beyond int32
        rows.block_tables[group].copy_(torch.from_numpy(table))
    return batch, rows


def _packed(updates: list[RowUpdate] | None = None, **step: object) -> torch.Tensor:
    words = np.full(4096 + LAYOUT.num_words(updates or []), -77, np.int32)
    num_words = pack_step(words, LAYOUT, updates=updates or [], **step)
    assert (words[num_words:] == -77).all()
    return torch.from_numpy(words)[:num_words]


def _step(computed: list[int], scheduled: list[int]) -> dict[str, np.ndarray]:
    rows = np.random.default_rng(1).permutation(NUM_ROWS)[: len(computed)].astype(np.int32)
    return {
        "rows": rows,
        "num_computed": np.array(computed, np.int32),
        "num_scheduled": np.array(scheduled, np.int32),
    }


def _poisoned(num_tokens: int, num_sequences: int) -> StepTensors:
    width = -(-MAX_LEN // S)
    out = StepTensors.allocate(
        num_tokens=num_tokens + 5,
        num_sequences=num_sequences + 3,
        num_groups=G,
        width=width,
        device=CPU,
    )
    for name in StepTensors.__slots__:
        getattr(out, name).fill_(-9)
    return out


def _assert_is(out: StepTensors, expected: StepInputs) -> None:
    """Real entries are the runner's, padding does nothing, nothing else was written."""
    T, R = len(expected.positions_T), len(expected.rows_R)
    assert out.token_ids_T[:T].tolist() == expected.token_ids_T.tolist()
    assert out.positions_T[:T].tolist() == expected.positions_T.tolist()
    assert out.query_start_loc_R1[: R + 1].tolist() == expected.query_start_R1.tolist()
    assert out.seq_lens_R[:R].tolist() == expected.seq_lens_R.tolist()
    for group in range(G):
        assert out.slot_mappings_GT[group, :T].tolist() == expected.slot_mappings_GT[group].tolist()
        for sequence, seq_len in enumerate(expected.seq_lens_R):
            blocks, table_RM = -(-int(seq_len) // S), expected.block_tables_GRM[group]
            found = out.block_tables_GRM[group, sequence]
            assert found[:blocks].tolist() == table_RM[sequence, :blocks].tolist()
            assert (found[blocks:] == -9).all()
    assert (out.token_ids_T[T:] == 0).all()
    assert (out.positions_T[T:] == 0).all()
    assert (out.slot_mappings_GT[:, T:] == -1).all()
    assert (out.query_start_loc_R1[R:] == T).all()
    assert (out.seq_lens_R[R:] == 0).all()
    assert (out.block_tables_GRM[:, R:] == -9).all()
    last_T = expected.query_start_R1[1:][expected.sampled_R] - 1
    assert out.logits_at_R[: len(last_T)].tolist() == last_T.tolist()
    assert (out.logits_at_R[len(last_T) :] == 0).all()


@pytest.mark.parametrize(("computed", "scheduled"), STEPS)
@pytest.mark.parametrize("padding", [(0, 0), (5, 0), (0, 3), (5, 3)])
def test_a_step_is_that_of_the_runner_and_padding_does_nothing(
    computed: list[int], scheduled: list[int], padding: tuple[int, int]
) -> None:
    batch, rows = _filled()
    step = _step(computed, scheduled)
    seq_lens = step["num_computed"] + step["num_scheduled"]
    needs_sampling = np.arange(len(computed)) % 2 == 0
    batch.num_tokens[step["rows"]] = seq_lens + np.where(needs_sampling, 0, 1)
    expected = gather_step_inputs(batch, **step)
    T, R = sum(scheduled), len(scheduled)
    whole = _poisoned(T, R)
    out = whole.first(T + padding[0], R + padding[1])
    prepare_step(_packed(needs_sampling=needs_sampling, **step), LAYOUT, rows, out, block_size=S)
    _assert_is(out, expected)
    assert (whole.token_ids_T[T + padding[0] :] == -9).all()
    assert (whole.slot_mappings_GT[:, T + padding[0] :] == -9).all()
    assert (whole.query_start_loc_R1[R + padding[1] + 1 :] == -9).all()
    assert (whole.logits_at_R[R + padding[1] :] == -9).all()


def test_an_empty_step_is_all_padding() -> None:
    _, rows = _filled()
    out = _poisoned(0, 0)
    packed = _packed(needs_sampling=np.zeros(0, bool), **_step([], []))
    prepare_step(packed, LAYOUT, rows, out, block_size=S)
    assert (out.slot_mappings_GT == -1).all()
    assert (out.query_start_loc_R1 == 0).all()
    assert (out.seq_lens_R == 0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sampled_tokens_are_appended_to_sampled_rows_only(dtype: torch.dtype) -> None:
    batch, rows = _filled()
    step = _step([20, 30, 4, MAX_LEN - 1, 0], [1, 3, 2, 1, 15])
    needs_sampling = np.array([True, False, True, True, True])
    batch.num_tokens[step["rows"]] = step["num_computed"] + step["num_scheduled"]
    expected = batch.token_ids.copy()
    for row, position, token in ((0, 21, 70), (2, 6, 71), (4, 15, 73)):
        expected[step["rows"][row], position] = token  # the fourth row is full: 72 is dropped
    sampled_N = torch.tensor([70, 71, 72, 73], dtype=dtype)
    packed = _packed(needs_sampling=needs_sampling, **step)
    append_sampled(packed, LAYOUT, sampled_N, rows, num_sequences=7)
    assert np.array_equal(rows.token_ids.numpy(), expected)


def test_updates_reach_tokens_and_block_tables_and_nothing_else() -> None:
    batch, rows = _filled()
    ids = np.arange(500000, 500000 + 2 * MOST_IDS + 7)
    width = batch.block_tables[0].shape[1]
    updates = [
        RowUpdate(0, 3, 0, [7, 8, 9]),
        RowUpdate(1, 3, width - 1, [4, 5, 6]),  # two past the width: lookahead
        RowUpdate(1, 0, 16, [1]),
        RowUpdate(0, 1, 5, []),
        RowUpdate(TOKEN_TABLE, 8, 0, ids[:2000]),
        RowUpdate(TOKEN_TABLE, 2, 50, ids[: 2 * MOST_IDS + 1]),
        RowUpdate(TOKEN_TABLE, 0, 2099, [13]),
    ]
    for update in updates:
        if update.table == TOKEN_TABLE:
            batch.token_ids[update.row, update.start :][: len(update.ids)] = update.ids
        else:
            blocks = [[], []]
            blocks[update.table] = list(update.ids)
            batch.write_blocks(update.row, update.start, blocks)
    packed = _packed(updates, needs_sampling=np.ones(1, bool), **_step([5], [1]))
    apply_row_updates(packed, rows)
    assert np.array_equal(rows.token_ids.numpy(), batch.token_ids)
    for group, table in enumerate(batch.block_tables):
        assert np.array_equal(rows.block_tables[group].numpy(), table)


def test_more_updates_than_programs_are_all_carried_out() -> None:
    _, rows = _filled()
    cells = list(itertools.product(range(NUM_ROWS), range(40)))
    updates = [RowUpdate(0, row, column, [row * 100 + column]) for row, column in cells]
    apply_row_updates(_packed(updates, needs_sampling=np.zeros(0, bool), **_step([], [])), rows)
    for row, column in cells:
        assert int(rows.block_tables[0, row, column]) == row * 100 + column


def test_steps_in_flight_give_what_the_runner_gives_one_after_the_other() -> None:
    """Tokens never visit the host: prompt, chunk and decodes, each step planned before its tokens
    are known."""
    batch = CPUInputBatch(SIZES)
    rows = DeviceRows.allocate(
        num_rows=NUM_ROWS, max_model_len=MAX_LEN, block_size=S, num_groups=G, device=CPU
    )
    prompts = {4: list(range(100, 117)), 1: list(range(200, 240))}
    updates = []
    for row, tokens in prompts.items():
        blocks = [[row * 10 + block + group * 1000 for block in range(4)] for group in range(G)]
        batch.write_row(row, tokens, blocks)
        updates.append(RowUpdate(TOKEN_TABLE, row, 0, tokens))
        updates += [RowUpdate(group, row, 0, ids) for group, ids in enumerate(blocks)]
    plans = [  # (row, computed, scheduled)
        [(4, 0, 17), (1, 0, 30)],
        [(1, 30, 10), (4, 17, 1)],
        [(4, 18, 1), (1, 40, 1)],
        [(1, 41, 1)],
    ]
    for number, plan in enumerate(plans):
        columns = np.array(plan)
        step = {"rows": columns[:, 0].astype(np.int32), "num_computed": columns[:, 1]}
        step["num_scheduled"] = columns[:, 2]
        expected = gather_step_inputs(batch, **step)
        needs_sampling = np.isin(np.arange(len(plan)), expected.sampled_R)
        packed = _packed(updates, needs_sampling=needs_sampling, **step)
        updates = []
        out = _poisoned(int(columns[:, 2].sum()), len(plan))
        apply_row_updates(packed, rows)
        prepare_step(packed, LAYOUT, rows, out, block_size=S)
        _assert_is(out, expected)
        sampled_N = torch.arange(int(needs_sampling.sum())) + 1000 * (number + 1)
        append_sampled(packed, LAYOUT, sampled_N, rows, num_sequences=len(plan))
        sampled_rows = expected.rows_R[expected.sampled_R]
        batch.append_tokens(sampled_rows, batch.num_tokens[sampled_rows], sampled_N.numpy())
    assert np.array_equal(rows.token_ids.numpy(), batch.token_ids)


def test_what_does_not_fit_is_refused_by_name() -> None:
    _, rows = _filled()
    step = _step([5], [1])
    many = {name: np.ones(12, np.int32) for name in step}
    with pytest.raises(ValueError, match="12 sequences, the layout has room for 11"):
        _packed(needs_sampling=np.ones(12, bool), **many)
    with pytest.raises(ValueError, match="the buffer has 10"):
        pack_step(np.zeros(10, np.int32), LAYOUT, needs_sampling=np.ones(1, bool), **step)
    packed, out = _packed(needs_sampling=np.ones(1, bool), **step), _poisoned(1, 1)
    with pytest.raises(ValueError, match="packed is int64"):
        apply_row_updates(packed.long(), rows)
    with pytest.raises(ValueError, match="the sampled tokens is float32"):
        append_sampled(packed, LAYOUT, torch.zeros(1), rows, num_sequences=1)
    with pytest.raises(ValueError, match="12 sequences"):
        append_sampled(packed, LAYOUT, torch.zeros(1).long(), rows, num_sequences=12)
    with pytest.raises(ValueError, match="out has 12 sequences"):
        prepare_step(packed, LAYOUT, rows, _poisoned(1, 9), block_size=S)
    narrow = DeviceRows(token_ids=rows.token_ids, block_tables=rows.block_tables[:, :, :5])
    with pytest.raises(ValueError, match="block_tables"):
        prepare_step(packed, LAYOUT, narrow, out, block_size=S)
