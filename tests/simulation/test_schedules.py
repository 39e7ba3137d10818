"""Simulated schedules of faults: exactly one end a request, the model's tokens, nothing left."""

import pytest

from tests.profiles import examples
from tests.simulation.schedule import run_schedule
from tests.simulation.settings import only

_CHUNK = 125


@pytest.mark.parametrize("chunk", range(examples(600) // _CHUNK or 1))
def test_every_request_ends_once_with_the_models_tokens(chunk):
    reports = [run_schedule(seed) for seed in range(chunk * _CHUNK, (chunk + 1) * _CHUNK)]
    assert sum(report.num_finished for report in reports) > 200
    assert sum(report.num_lives > 1 for report in reports) > 10, "the faults strike"
    assert sum(report.num_merged > 0 for report in reports) > 5, "slow readers' outputs are merged"


def largest_gap_of_floods():
    """Seconds between two outputs, while a client sends more than can be taken in. A narrow queue
    has gaps of its own."""
    floods = only(num_floods=(1,), send_queue=(128,))
    return max(run_schedule(seed, floods).largest_gap_s for seed in range(5, 9))


@pytest.mark.slow
def test_a_flood_of_one_client_does_not_stop_the_others():
    assert largest_gap_of_floods() < 0.5


def slow_readers(backlog_bytes):
    settings = only(
        num_pauses=(3,), send_queue=(2,), long_pauses_s=(10.0,), backlog_bytes=(backlog_bytes,)
    )
    return [run_schedule(seed, settings) for seed in range(examples(20))]


def test_a_client_that_stands_still_for_ten_seconds_loses_nothing_and_is_not_dropped():
    reports = slow_readers(backlog_bytes=2**24)
    assert sum(report.num_merged for report in reports) > 0
    assert not any(report.num_dropped for report in reports)


def test_a_client_that_is_dropped_while_it_stands_still_resumes_and_loses_nothing():
    assert any(report.num_dropped for report in slow_readers(backlog_bytes=600))


def test_what_the_engine_had_before_a_drain_is_finished_and_read():
    for seed in range(examples(30)):
        run_schedule(seed, only(num_pauses=(3,), num_drains=(1,), stays_away=(True,)))


def test_streams_of_three_engines_move_and_every_request_ends_once_with_the_models_tokens():
    faults = {"num_kills": (0, 1, 3), "num_cuts": (0, 2), "num_pauses": (1,), "num_drains": (0, 1)}
    reports = [
        run_schedule(
            seed, only(engines=(2, 3), max_queued=(None, 4), event_fault_rate=(0.0, 0.5), **faults)
        )
        for seed in range(examples(8))
    ]
    assert sum(report.num_resumptions for report in reports) > 0
    assert sum(report.num_event_gaps for report in reports) > 0, "what was lost is asked for again"
    assert sum(report.num_views for report in reports) > 0, "who missed nothing knows all"


def test_a_rolling_update_loses_no_request_and_each_answer_is_of_one_set_of_weights():
    faults = {"num_kills": (0, 0, 1, 2), "num_cuts": (0, 1), "num_pauses": (0, 1)}
    reports = [
        run_schedule(
            seed,
            only(
                engines=(2, 3),
                num_rolling=(1, 2),
                num_requests=(10, 30),
                drain_timeout_s=(0.5, 60.0),
                **(faults if seed % 2 else {}),
            ),
        )
        for seed in range(examples(8))
    ]
    assert sum(report.num_new for report in reports) > 5


def test_a_seed_gives_the_same_schedule_again():
    for seed in range(5):
        one, other = run_schedule(seed, keeps_trace=True), run_schedule(seed, keeps_trace=True)
        assert one == other
        assert one.trace
