"""Steps made on the device: what tests/gpu/test_step_inputs.py leaves out,
which holds random steps against the specification."""

import numpy as np
import pytest
import torch

from kernels.interface.step_inputs import DeviceRows, PackedLayout, StepTensors, pack_step
from kernels.triton.step_inputs import append_sampled, apply_row_updates, prepare_step
from tests.gpu.device import DEVICE

NUM_ROWS, MAX_LEN, S, G = 9, 2100, 16, 2
WHERE = torch.device(DEVICE)
LAYOUT = PackedLayout(capacity=11)


@pytest.fixture
def rows() -> DeviceRows:
    made = DeviceRows.allocate(
        num_rows=NUM_ROWS, max_model_len=MAX_LEN, block_size=S, num_groups=G, device=WHERE
    )
    made.token_ids.random_(1, 30000)
    made.block_tables.random_(1, 1000)
    return made


def packed_step(
    num_computed: list[int], num_scheduled: list[int], shifts: list[int] | None = None
) -> torch.Tensor:
    """Of the first rows, all of them sampled."""
    number = len(num_computed)
    words = np.zeros(LAYOUT.num_words(), np.int32)
    pack_step(
        words,
        LAYOUT,
        rows=np.arange(number, dtype=np.int32),
        num_computed=np.array(num_computed, np.int32),
        num_scheduled=np.array(num_scheduled, np.int32),
        needs_sampling=np.ones(number, bool),
        shifts=None if shifts is None else np.array(shifts, np.int32),
    )
    return torch.from_numpy(words).to(DEVICE)


def poisoned(num_tokens: int, num_sequences: int) -> StepTensors:
    out = StepTensors.allocate(
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_groups=G,
        width=-(-MAX_LEN // S),
        device=WHERE,
    )
    for name in StepTensors.__slots__:
        getattr(out, name).fill_(-9)
    return out


def test_an_empty_step_is_all_padding(rows: DeviceRows) -> None:
    out = poisoned(5, 3)
    prepare_step(packed_step([], []), LAYOUT, rows, out, block_size=S)
    assert (out.slot_mappings_GT == -1).all()
    for name in ("token_ids_T", "positions_T", "query_start_loc_R1", "seq_lens_R", "logits_at_R"):
        assert not getattr(out, name).any()
    assert (out.block_tables_GRM == -9).all()


def test_nothing_is_written_behind_a_bucket_nor_blocks_behind_a_sequence(rows: DeviceRows) -> None:
    whole = poisoned(40, 9)
    packed = packed_step([5, 15, 0], [1, 1, 17])
    prepare_step(packed, LAYOUT, rows, whole.first(24, 6), block_size=S)
    for name, size in (("token_ids_T", 24), ("positions_T", 24), ("seq_lens_R", 6)):
        assert (getattr(whole, name)[:size] != -9).all()
        assert (getattr(whole, name)[size:] == -9).all()
    assert (whole.slot_mappings_GT[:, 24:] == -9).all()
    assert (whole.query_start_loc_R1[7:] == -9).all()
    assert (whole.logits_at_R[6:] == -9).all()
    assert (whole.block_tables_GRM == -9).sum(dim=2).tolist() == [[131, 131, 130] + [132] * 6] * G


def test_positions_are_shifted_and_slots_are_not(rows: DeviceRows) -> None:
    plain, shifted = poisoned(24, 6), poisoned(24, 6)
    prepare_step(packed_step([5, 15, 20], [1, 1, 17]), LAYOUT, rows, plain, block_size=S)
    packed = packed_step([5, 15, 20], [1, 1, 17], [0, -7, -11])
    prepare_step(packed, LAYOUT, rows, shifted, block_size=S)
    difference_T = plain.positions_T - shifted.positions_T
    assert difference_T.tolist() == [0, 7] + [11] * 17 + [0] * 5
    for name in ("token_ids_T", "slot_mappings_GT", "seq_lens_R"):
        assert torch.equal(getattr(plain, name), getattr(shifted, name))


def test_sampled_tokens_of_32_bits_are_appended(rows: DeviceRows) -> None:
    expected = rows.token_ids.clone()
    expected[0, 21], expected[1, 33] = 70, 71  # the third row is full: 72 is dropped
    packed = packed_step([20, 30, MAX_LEN - 1], [1, 3, 1])
    sampled_N = torch.tensor([70, 71, 72], dtype=torch.int32)
    append_sampled(packed, LAYOUT, sampled_N, rows, num_sequences=7)
    assert torch.equal(rows.token_ids, expected)


def test_what_does_not_fit_is_refused_by_name(rows: DeviceRows) -> None:
    with pytest.raises(ValueError, match="12 sequences, the layout has room for 11"):
        packed_step([1] * 12, [1] * 12)
    one, flags = np.ones(1, np.int32), np.ones(1, bool)
    step = {"rows": one, "num_computed": one, "num_scheduled": one, "needs_sampling": flags}
    with pytest.raises(ValueError, match="the buffer has 10"):
        pack_step(np.zeros(10, np.int32), LAYOUT, **step)
    packed, out = packed_step([5], [1]), poisoned(1, 1)
    with pytest.raises(ValueError, match="packed is int64"):
        apply_row_updates(packed.long(), rows)
    with pytest.raises(ValueError, match="the sampled tokens is float32"):
        append_sampled(packed, LAYOUT, torch.zeros(1), rows, num_sequences=1)
    with pytest.raises(ValueError, match="12 sequences"):
        append_sampled(packed, LAYOUT, torch.zeros(1).long(), rows, num_sequences=12)
    with pytest.raises(ValueError, match="out has 12 sequences"):
        prepare_step(packed, LAYOUT, rows, poisoned(1, 12), block_size=S)
    narrow = DeviceRows(token_ids=rows.token_ids, block_tables=rows.block_tables[:, :, :5])
    with pytest.raises(ValueError, match="block_tables"):
        prepare_step(packed, LAYOUT, narrow, out, block_size=S)
