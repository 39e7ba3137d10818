"""What a plan changes on the device, and how it is cut into copies. No device is needed."""

import secrets

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_runner.gpu.input_batch import _without_overlap, pack_sampling
from engine_core.model_runner.gpu.packing import cut_updates
from engine_core.model_runner.sampling_params import resolve_sampling
from kernels.interface.sampling_rows import NUM_STATE_WORDS, StateFlag, StateWord, TokenList
from kernels.interface.step_inputs import TOKEN_TABLE, PackedLayout, RowUpdate
from protocol.sampling import SamplingParams

UPDATES = st.lists(
    st.builds(
        RowUpdate,
        table=st.integers(-1, 1),
        row=st.integers(0, 2),
        start=st.integers(0, 30),
        ids=st.lists(st.integers(0, 99), max_size=12),
    ),
    max_size=9,
)


def cells_of(updates):
    """What each cell holds after all updates, and how often it was written."""
    cells, times = {}, {}
    for update in updates:
        for offset, number in enumerate(update.ids):
            cell = (update.table, update.row, update.start + offset)
            cells[cell] = number
            times[cell] = times.get(cell, 0) + 1
    return cells, times


@given(UPDATES)
def test_updates_without_overlap_write_the_last_id_of_each_cell_once(updates):
    cells, times = cells_of(_without_overlap(updates))
    assert cells == cells_of(updates)[0]
    assert set(times.values()) <= {1}


@given(UPDATES, st.integers(30, 60))
def test_cut_updates_write_the_same_cells_in_parts_that_fit(updates, max_words):
    updates = _without_overlap(updates)
    parts = list(cut_updates(updates, max_words))
    assert all(0 < PackedLayout(0).num_words(part) <= max_words for part in parts)
    whole, times = cells_of([update for part in parts for update in part])
    assert whole == cells_of(updates)[0]
    assert set(times.values()) <= {1}


def test_an_update_of_many_records_is_cut_to_fit():
    update = RowUpdate(TOKEN_TABLE, 3, 5, np.arange(10_000))
    parts = list(cut_updates([update], 3000))
    assert all(PackedLayout(0).num_words(part) <= 3000 for part in parts)
    assert len(parts) == 4
    assert cells_of([each for part in parts for each in part])[0] == cells_of([update])[0]


def test_a_buffer_that_holds_no_update_is_refused():
    with pytest.raises(ValueError, match="12 words hold no update"):
        list(cut_updates([RowUpdate(0, 0, 0, [1])], 12))


def pack(vocab_size=131, **fields):
    params = SamplingParams(**{"max_tokens": 9, "seed": 2**63 + 5, **fields})
    sampling = resolve_sampling(
        params,
        num_prompt_tokens=10,
        eos_token_ids=(7,),
        vocab_size=vocab_size,
        draw_seed=lambda: secrets.randbits(64),
    )
    packed = pack_sampling(sampling, vocab_size=vocab_size)
    return sampling, packed, packed.tables[TOKEN_TABLE]


def test_a_seed_of_64_bits_stands_in_two_words():
    _, _, state = pack()
    pair = state[StateWord.SEED_LOW : StateWord.SEED_HIGH + 1]
    assert int(pair.view(np.uint64)[0]) == 2**63 + 5


def test_a_request_without_a_seed_gets_one_and_a_greedy_one_none():
    first, second = (pack(seed=None)[0].params.seed for _ in range(2))
    assert first != second
    assert pack(seed=None, temperature=0.0)[0].params.seed is None


def test_plain_requests_need_nothing_else():
    sampling, packed, state = pack()
    assert len(state) == NUM_STATE_WORDS
    assert (sampling.is_truncated, packed.needs_full, sampling.num_logprobs) == (False, False, -1)
    assert sampling.min_length == 0


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_limit_truncates_and_no_more(fields):
    sampling, packed, _ = pack(**fields)
    assert (sampling.is_truncated, packed.needs_full) == (True, False)


def test_a_top_k_of_the_vocabulary_is_no_limit():
    sampling, _, state = pack(top_k=131)
    assert (sampling.is_truncated, state[StateWord.TOP_K]) == (False, 0)


def test_allowed_tokens_are_a_mask_behind_the_state():
    _, packed, state = pack(allowed_token_ids=(0, 33, 130))
    assert packed.needs_full
    assert state[StateWord.FLAGS] == StateFlag.MASKED
    bits = np.unpackbits(state[NUM_STATE_WORDS:].view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [0, 33, 130]


def test_min_tokens_forbid_the_end_until_that_length():
    sampling, packed, state = pack(min_tokens=4, stop_token_ids=(9, 7))
    assert sampling.min_length == state[StateWord.MIN_LENGTH] == 14
    assert packed.tables[TokenList.MIN_TOKENS_IDS].tolist() == [7, 9]
    assert not packed.needs_full


@pytest.mark.parametrize(
    ("asked", "vocab_size", "number", "on_device"),
    [(0, 131, 0, 0), (5, 131, 5, 5), (128, 131, 128, 128), (-1, 131, 131, -1), (9, 8, 8, 8)],
)
def test_more_log_probabilities_than_the_device_reports_come_from_the_host(
    asked, vocab_size, number, on_device
):
    sampling, packed, state = pack(logprobs=asked, vocab_size=vocab_size)
    assert (sampling.num_logprobs, state[StateWord.NUM_LOGPROBS]) == (number, on_device)
    assert packed.needs_full == (on_device >= 0)


def test_more_biases_than_a_row_holds_are_refused_by_name():
    _, packed, state = pack(logit_bias=dict.fromkeys(range(1025), 1.0))
    assert packed.refusal == "logit_bias names 1025 tokens, the device takes 1024; name fewer"
    assert state[StateWord.NUM_BIASES] == 0
