"""What the scheduler counts for metrics: steps, look-ups, preemptions, SLO attainment."""

import pytest
from driving import Drive, make_request, make_scheduler, result

from engine_core.scheduler import PauseState, RequestStatus
from protocol.calls import STEP_TOKENS_BOUNDS


def test_the_tokens_of_steps_are_split_into_prefill_and_decode():
    drive = Drive(make_scheduler(budget=10), make_request("a", 3), make_request("b", 9))
    composition = []
    for _ in range(3):
        drive.step()
        numbers = drive.scheduler.statistics()
        composition.append((numbers.num_prefill_tokens, numbers.num_decode_tokens))
    # a: 3, 1, 1 tokens; b: 7, 2, 1
    assert composition == [(10, 0), (12, 1), (12, 3)]
    assert numbers.num_steps == sum(numbers.num_steps_by_tokens) == 3
    by_bound = dict(zip((*STEP_TOKENS_BOUNDS, None), numbers.num_steps_by_tokens, strict=True))
    assert {bound: steps for bound, steps in by_bound.items() if steps} == {8: 2, 16: 1}


def test_a_step_without_tokens_is_not_counted():
    scheduler = make_scheduler()
    scheduler.schedule()
    assert sum(scheduler.statistics().num_steps_by_tokens) == 0


def test_look_ups_are_counted_by_why_they_ended_and_by_what_they_found():
    drive = Drive(make_scheduler(), make_request("first", 40))
    drive.step()
    drive.step()
    drive.add(make_request("short", 2))
    drive.step()
    drive.add(make_request("again", 40))
    drive.step()
    numbers = drive.scheduler.statistics()
    assert sum(numbers.num_lookups_by_end.values()) == 3
    assert numbers.num_lookups_by_end["too short"] == 1
    assert sum(numbers.num_lookup_hits_by_end.values()) == sum(
        request.account.cache_lookup.num_tokens > 0 for request in drive.requests
    )
    for request in drive.requests:
        assert numbers.num_lookups_by_end[request.account.cache_lookup.ended.value] >= 1


def test_preemptions_are_counted_by_cause_and_add_up():
    drive = Drive(
        make_scheduler(num_blocks=6, block_size=4, max_num_seqs=2),
        make_request("a", 9),
        make_request("b", 9),
    )
    for _ in range(8):
        drive.step()
    drive.scheduler.preempt_all("the engine goes to sleep")
    drive.scheduler.set_pause_state(PauseState.PAUSED_ALL, "asleep")
    drive.step()
    numbers = drive.scheduler.statistics()
    assert numbers.num_preemptions_by_cause["blocks"] > 0
    assert sum(numbers.num_preemptions_by_cause.values()) == numbers.num_preemptions


@pytest.mark.parametrize(
    ("first_s", "step_s", "violations"),
    [(0.09, 0.009, (0, 0)), (0.11, 0.009, (1, 0)), (0.09, 0.011, (0, 1)), (0.2, 0.02, (1, 1))],
)
def test_slo_attainment_is_that_of_mean_tpot_and_of_ttft(first_s, step_s, violations):
    scheduler = make_scheduler(slo_tpot_ms=10, slo_ttft_ms=100)
    drive = Drive(scheduler, make_request("a", 4, max_tokens=6))
    now = 0.0
    for number in range(6):
        plan = scheduler.schedule(now=now)
        now += first_s if number == 0 else step_s
        scheduler.update_from_output(plan, result(plan, {}, drive.requests), now=now)
    numbers = scheduler.statistics()
    assert numbers.num_slo_requests == 1
    assert (numbers.num_slo_ttft_violations, numbers.num_slo_tpot_violations) == violations
    assert numbers.num_slo_met == (violations == (0, 0))


def test_an_aborted_request_is_not_measured_against_slos():
    scheduler = make_scheduler(slo_tpot_ms=10)
    drive = Drive(scheduler, make_request("a", 4))
    drive.step()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.statistics().num_slo_requests == 0


def test_without_slos_nothing_is_measured():
    drive = Drive(make_scheduler(), make_request("a", 4, max_tokens=1))
    drive.step()
    assert drive.scheduler.statistics().num_slo_requests == 0
