"""How many drafts: from acceptance, what they cost, and what an SLO leaves."""

import numpy as np
import pytest

from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.speculation.draft_lengths import DraftLengths
from engine_core.scheduler.token_budget.base import StepLoad

NUM_ROWS = 64


def lengths_of(*, slo_tpot_s=None, most=8):
    batch = BatchState(NUM_ROWS, 4096)
    batch.num_tokens[:] = 100
    return batch, DraftLengths(batch, most=most, slo_tpot_s=slo_tpot_s)


def time_steps(lengths, number, *, draft_s, plain_s=0.02):
    """Steps of `number` sequences, with and without drafts."""
    for step in range(60):
        num_drafts = step % 6
        load = StepLoad(number + num_drafts, number, number * 100, number * 100)
        if lengths.counts_step(number, num_drafts):
            lengths.observe_step(load, plain_s + num_drafts * draft_s)


def chosen(lengths, rows):
    return lengths.choose(np.array(rows), np.array(rows)).tolist()


def test_cheap_drafts_that_are_accepted_come_in_full_length_and_rejected_ones_stop():
    _, lengths = lengths_of()
    time_steps(lengths, 2, draft_s=0.0005)
    for _ in range(20):
        lengths.observe_drafts(0, 8, 8)
        lengths.observe_drafts(1, 2, 0)
    assert chosen(lengths, [0, 1]) == [8, 0]


def test_the_less_is_accepted_and_the_more_a_draft_costs_the_fewer():
    numbers = []
    for draft_s, num_accepted in ((0.0005, 3), (0.004, 3), (0.0005, 1), (0.004, 1), (0.03, 3)):
        _, lengths = lengths_of()
        time_steps(lengths, 1, draft_s=draft_s)
        for _ in range(20):
            lengths.observe_drafts(0, 4, num_accepted)
        numbers.append(chosen(lengths, [0])[0])
    assert numbers[0] > numbers[1] > 0
    assert numbers[0] > numbers[2] >= numbers[3]
    assert numbers[-1] == 0  # a draft costs more than a token


def test_a_batch_in_which_each_token_costs_a_tokens_time_gets_none():
    _, lengths = lengths_of()
    time_steps(lengths, 32, draft_s=0.001, plain_s=0.032)
    for row in range(32):
        lengths.observe_drafts(row, 4, 3)
    assert chosen(lengths, range(32)) == [0] * 32


def test_few_drafts_until_their_cost_is_known():
    _, lengths = lengths_of()
    assert 1 <= max(chosen(lengths, [0, 1])) <= 2


def test_a_sequence_without_luck_is_tried_again_ever_more_seldom():
    batch, lengths = lengths_of()
    time_steps(lengths, 1, draft_s=0.002)
    for _ in range(10):
        lengths.observe_drafts(0, 1, 0)
    tries = []
    for length in range(100, 4000):
        batch.num_tokens[0] = length
        if chosen(lengths, [0])[0]:
            tries.append(length)
            lengths.observe_drafts(0, 1, 0)
    gaps = np.diff(tries)
    assert len(tries) < 12
    assert (gaps[1:] >= gaps[:-1]).all()
    for _ in range(4):
        lengths.observe_drafts(0, 1, 1)
    assert chosen(lengths, [0])[0] > 0


def test_a_new_sequence_begins_with_two_drafts_and_gets_more_while_all_are_accepted():
    _, lengths = lengths_of()
    time_steps(lengths, 1, draft_s=0.0005)
    for _ in range(50):
        lengths.observe_drafts(1, 8, 8)  # another one's luck
    numbers = []
    for _ in range(4):
        numbers += chosen(lengths, [0])
        lengths.observe_drafts(0, numbers[-1], numbers[-1])
    assert numbers == [2, 4, 8, 8]
    lengths.observe_drafts(0, 8, 2)
    assert chosen(lengths, [0])[0] <= 3


def test_a_row_that_changes_hands_begins_anew():
    batch, lengths = lengths_of()
    time_steps(lengths, 1, draft_s=0.003)
    for _ in range(20):
        lengths.observe_drafts(0, 2, 0)
        lengths.observe_drafts(1, 8, 8)
    assert chosen(lengths, [0]) == [0]
    batch.change_owner(0)
    assert chosen(lengths, [0])[0] > 0


def dear_steps(lengths, number, num_steps):
    """Steps in which drafts cost three times a token. Returns the steps that had one."""
    rows, drafted = list(range(number)), []
    for step in range(num_steps):
        num_drafts = sum(chosen(lengths, rows))
        drafted += [step] * num_drafts
        load = StepLoad(number + num_drafts, number, number * 100, number * 100)
        if lengths.counts_step(number, num_drafts):
            lengths.observe_step(load, 0.01 * number + 0.03 * num_drafts)
        for row in rows[-num_drafts:] if num_drafts else ():
            lengths.observe_drafts(row, 1, 1)
    return drafted


@pytest.mark.parametrize("slo_tpot_s", [None, 1.0])
def test_drafts_that_are_too_dear_are_measured_again_after_steps_however_often_it_is_asked(
    slo_tpot_s,
):
    """Each step is asked for with an SLO, and where requests come and go."""
    batch, lengths = lengths_of(slo_tpot_s=slo_tpot_s)
    dear_steps(lengths, 4, 60)
    drafted = []
    for _ in range(8):
        batch.change_owner(0)
        drafted.append(len(dear_steps(lengths, 4, 128)))
    assert all(number <= 2 for number in drafted)
    assert 4 <= sum(drafted) <= 10


@pytest.mark.parametrize(("slo_tpot_s", "most"), [(0.03, 8), (0.0215, 1), (0.0199, 0), (0.01, 0)])
def test_no_step_gets_longer_than_the_slo(slo_tpot_s, most):
    _, lengths = lengths_of(slo_tpot_s=slo_tpot_s)
    time_steps(lengths, 1, draft_s=0.001)
    for _ in range(10):
        lengths.observe_drafts(0, 8, 8)
    assert chosen(lengths, [0]) == [most]
