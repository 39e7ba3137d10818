"""The budget that keeps SLOs: each rule alone, then against fixed budgets in a small loop."""

import numpy as np
import pytest
from budget_loop import H200, SMALL_CPU, bursty_trace, run

from engine_core.scheduler.token_budget.base import (
    RunningSequences,
    StepLoad,
    TokenBudget,
    WaitingRequests,
)
from engine_core.scheduler.token_budget.cost_model import CostModel
from engine_core.scheduler.token_budget.slo import SLOTokenBudget


def running(*sequences: tuple[int, int, int, float | None], arrival_s: float = 0.0):
    """Each (prompt, output, computed, first token at)."""
    prompt, output, computed, first = (
        (np.array(column) for column in zip(*sequences, strict=True)) if sequences else [[]] * 4
    )
    return RunningSequences(
        num_tokens=np.asarray(prompt, np.int32) + np.asarray(output, np.int32),
        num_computed_tokens=np.asarray(computed, np.int32),
        num_prompt_tokens=np.asarray(prompt, np.int32),
        first_token_s=np.array([np.nan if f is None else f for f in first], np.float64),
        arrival_s=np.full(len(sequences), arrival_s),
        max_len=np.asarray(prompt, np.int32) + 1_000,
    )


def waits(arrival_s: float, num_requests: int = 1, num_tokens: int = 100_000, admissible=True):
    """A queue, whose head arrived then."""
    num_admissible = num_requests if admissible else 0
    return WaitingRequests(num_requests, num_tokens, arrival_s, num_admissible)


def decode(first_s: float, num_outputs: int, prompt: int = 100):
    return (prompt, num_outputs, prompt + num_outputs - 1, first_s)


def trained(**options) -> SLOTokenBudget:
    """Fitted to a machine: 10 ms a step, 1 ms a sequence, 0.1 ms a chunk token."""
    model = CostModel()
    for number in range(120):
        sequences, chunk = 1 + number % 20, (number % 3) * 400
        load = StepLoad(sequences + chunk, sequences + (chunk > 0), 0, 0)
        model.observe(load, 0.010 + 0.001 * load.num_sequences + 0.0001 * (chunk - (chunk > 0)))
    return SLOTokenBudget(8_192, cost_model=model, margin=0.0, **options)


def test_without_an_slo_or_without_decodes_a_step_may_have_all_tokens():
    alone = running((500, 0, 100, None))
    assert trained(target_tpot_s=0.05).num_tokens(9.0, running(), waits(1.0)) == 8_192
    assert trained(target_tpot_s=0.05).num_tokens(9.0, alone, waits(1.0)) == 8_192


def test_a_new_request_lends_what_a_decode_step_leaves_of_its_target():
    """50 ms less 11 for the decode and 1 for the chunk's sequence: 38 ms at 0.1 ms."""
    budget = trained(target_tpot_s=0.05)
    assert budget.num_tokens(7.0, running(decode(7.0, 1)), waits(6.0)) == pytest.approx(381, abs=8)


def test_a_request_that_is_ahead_lends_its_slack_too():
    """Ten tokens behind the first in 0.47 s instead of 0.5: 30 ms more."""
    budget = trained(target_tpot_s=0.05)
    state = running(decode(7.0, 11))
    assert budget.num_tokens(7.5, state, waits(6.0)) == pytest.approx(381, abs=8)
    assert budget.num_tokens(7.47, state, waits(6.0)) == pytest.approx(681, abs=14)


def test_the_least_slack_rules():
    budget = trained(target_tpot_s=0.05)
    ahead, new = decode(5.0, 200), decode(9.0, 1)
    assert budget.num_tokens(9.0, running(ahead), waits(6.0)) > 800
    together = budget.num_tokens(9.0, running(ahead, new), waits(6.0))
    assert together == pytest.approx(372, abs=8)


def test_one_that_is_behind_and_may_catch_up_lends_nothing():
    budget = trained(target_tpot_s=0.05)
    behind = running(decode(7.0, 100))
    assert budget.num_tokens(7.0 + 100 * 0.05 + 1.0, behind, waits(6.0)) == 1 + 4


def test_an_slo_that_cannot_be_met_does_not_drag_the_rest():
    budget = trained(target_tpot_s=0.05)
    lost, new = decode(0.0, 3), decode(99.0, 1)
    alone = budget.num_tokens(99.0, running(new, decode(99.0, 1)), waits(6.0))
    assert budget.num_tokens(99.0, running(lost, new), waits(6.0)) == alone
    assert budget.num_tokens(99.0, running(lost), waits(6.0)) == 8_192


def test_a_target_that_no_step_can_keep_costs_no_throughput():
    assert (
        trained(target_tpot_s=0.002).num_tokens(9.0, running(decode(7.0, 9)), waits(6.0)) == 8_192
    )


def test_a_batch_too_large_for_its_target_drains():
    """30 decodes take 40 ms; one alone would keep 20."""
    many = running(*[decode(0.0, 50)] * 30)
    assert trained(target_tpot_s=0.02).num_tokens(9.0, many, waits(8.9)) == 30 + 4


def both_targets() -> SLOTokenBudget:
    return trained(target_tpot_s=0.05, target_ttft_s=1.0)


def test_prompts_that_would_be_late_get_a_longer_chunk_than_is_harmless_to_few_answers():
    """Five prompts of 800 tokens have 0.5 s left. Harmless are 380 tokens in 50 ms, and again
    only when the answer is ahead: it is one, they are five."""
    state, queue = running(decode(7.0, 1, 30)), waits(6.5, 5, 5 * 800)
    within_slo = trained(target_tpot_s=0.05).num_tokens(7.0, state, queue)
    assert both_targets().num_tokens(7.0, state, queue) > 2 * within_slo


def near_their_end(*, arrival_s: float = 0.0):
    """Twenty answers without slack, with so few tokens left that they cannot catch up."""
    state = running(*[decode(0.0, 100, 5_000)] * 20, arrival_s=arrival_s)
    state.max_len[:] = 5_102
    return state


def test_one_prompt_is_not_saved_at_the_cost_of_many_answers():
    queue = waits(4.1, 1, 2_000)
    within_slo = trained(target_tpot_s=0.05).num_tokens(5.0, near_their_end(), queue)
    assert both_targets().num_tokens(5.0, near_their_end(), queue) < within_slo + 200


def test_answers_that_can_catch_up_lend_more_than_their_slack():
    """A thousand tokens at 20 ms less than the target pay for 200 ms."""
    state, queue = running(*[decode(0.0, 100, 5_000)] * 20), waits(4.1, 1, 2_000)
    state.max_len[:] = 6_100
    within_slo = trained(target_tpot_s=0.05).num_tokens(5.0, state, queue)
    assert both_targets().num_tokens(5.0, state, queue) > within_slo + 800


def test_answers_whose_first_token_was_late_are_not_weighed_again():
    queue, budget = waits(4.2, 2, 2_000), both_targets()
    in_time = budget.num_tokens(5.0, near_their_end(arrival_s=-0.5), queue)
    late = budget.num_tokens(5.0, near_their_end(arrival_s=-1.5), queue)
    assert late > 2 * in_time


def test_who_waits_and_cannot_be_admitted_does_not_shorten_anybodys_time():
    state = running(decode(7.0, 1, 30))
    within_slo = trained(target_tpot_s=0.05).num_tokens(7.0, state, waits(6.5, 5, 4_000))
    blocked = waits(6.5, 5, 4_000, admissible=False)
    assert both_targets().num_tokens(7.0, state, blocked) == within_slo


def test_with_nothing_to_prefill_the_budget_is_open():
    many = running(*[decode(0.0, 5)] * 600)
    assert both_targets().num_tokens(0.25, many, None) == 8_192


def test_a_request_computed_again_after_a_preemption_is_a_prompt_not_a_decode():
    budget = trained(target_tpot_s=0.05)
    again = (400, 100, 20, 1.0)
    new = decode(9.0, 1)
    assert budget.num_tokens(9.0, running(again), waits(6.0)) == 8_192
    assert budget.num_tokens(9.0, running(new, again), waits(6.0)) == pytest.approx(381, abs=8)


def test_every_step_has_its_decodes_and_a_few_prompt_tokens_and_never_more_than_the_limit():
    many = running(*[decode(0.0, 5)] * 600)
    budget = trained(target_tpot_s=0.05)
    assert budget.num_tokens(0.25, many, waits(0.2)) == 604
    for limit in (1, 2, 512):
        budget = SLOTokenBudget(limit, 0.05, cost_model=trained(target_tpot_s=1.0).cost_model)
        assert budget.num_tokens(0.25, many, waits(0.2)) == limit


def test_before_the_model_is_fitted_chunks_begin_small_and_double():
    budget = SLOTokenBudget(300, target_tpot_s=0.05)
    state, seen = running(decode(7.0, 1)), []
    for chunk in (32, 64, 128, 256, 512):
        seen.append(budget.num_tokens(7.0, state, 6.0))
        budget.observe(StepLoad(1 + chunk, 2, 200, 0), 0.01 + chunk * 1e-4)
    assert seen == [33, 65, 129, 257, 300]


def test_a_chunk_is_at_most_twice_as_long_as_any_that_was_seen():
    model = CostModel()
    for chunk in (8, 9, 10) * 10:
        model.observe(StepLoad(1 + chunk, 2, 0, 0), 0.001)
    budget = SLOTokenBudget(8_192, target_tpot_s=10.0, cost_model=model)
    assert budget.num_tokens(7.0, running(decode(7.0, 1)), waits(6.0)) == 1 + 2 * 9


CASES = {
    "chat on a small CPU": (
        SMALL_CPU,
        {"rate": 0.45, "num_requests": 150, "prompt": (32, 1024), "output": (16, 160)},
        0.15,
        4.0,
    ),
    "long prompts on a small CPU": (
        SMALL_CPU,
        {"rate": 0.2, "num_requests": 110, "prompt": (200, 2000), "output": (20, 200)},
        0.15,
        8.0,
    ),
    "chat on an H200": (
        H200,
        {"rate": 17, "num_requests": 700, "prompt": (200, 4000), "output": (30, 300)},
        0.015,
        0.8,
    ),
    "documents on an H200": (
        H200,
        {"rate": 5.5, "num_requests": 400, "prompt": (1000, 8000), "output": (50, 400)},
        0.014,
        1.5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fewer_slos_are_violated_than_with_any_fixed_budget_at_equal_throughput(case):
    machine, shape, target_tpot_s, target_ttft_s = CASES[case]
    trace = bursty_trace(1, **shape)
    budget = SLOTokenBudget(8_192, target_tpot_s, target_ttft_s)
    outcome = run(machine, trace, budget)
    broken = outcome.num_broken(target_ttft_s, target_tpot_s)
    for size in (64, 256, 1024, 4096):
        fixed = run(machine, trace, TokenBudget(size))
        assert broken < fixed.num_broken(target_ttft_s, target_tpot_s), size
        assert outcome.makespan_s < 1.03 * fixed.makespan_s, size
