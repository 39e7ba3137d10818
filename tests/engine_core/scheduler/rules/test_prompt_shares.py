"""A short prompt behind long ones: in how many steps it is computed, and what that costs them."""

from types import SimpleNamespace

import numpy as np
import pytest
from driving import Drive, make_request, make_scheduler

from engine_core.scheduler import RequestStatus
from engine_core.scheduler.rules.prompt_shares import PromptShares

BUDGET = 128


def drive_with(*long_ones, **options):
    scheduler = make_scheduler(
        budget=BUDGET, num_blocks=20_000, max_model_len=16_384, **{"max_num_seqs": 64, **options}
    )
    drive = Drive(scheduler, *long_ones)
    drive.step()
    return drive


def steps_until_computed(drive, name, num_tokens):
    """Steps in which `num_tokens` of a request are computed, from now on."""
    steps = 0
    while num_tokens > 0:
        num_tokens -= drive.step().num_scheduled_tokens.get(name, 0)
        steps += 1
        assert steps < 1000
    return steps


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_a_short_prompt_behind_one_of_8000_tokens_takes_a_step_for_half_a_budget(
    num_tokens, policy
):
    drive = drive_with(make_request("long", 8000), scheduling_policy=policy)
    drive.add(make_request("short", num_tokens))
    assert steps_until_computed(drive, "short", num_tokens) == -(-num_tokens // (BUDGET // 2))


def test_a_long_prompt_gives_up_no_more_tokens_than_the_short_ones_compute():
    alone = steps_until_computed(drive_with(make_request("long", 8000)), "long", 8000 - BUDGET)
    drive = drive_with(make_request("long", 8000))
    for index in range(10):
        drive.add(make_request(f"short-{index}", 60, max_tokens=50))
    given_up = 10 * (60 + 50)
    assert steps_until_computed(drive, "long", 8000 - BUDGET) <= alone + -(-given_up // BUDGET)


def test_the_long_prompt_keeps_half_of_its_pace_under_an_endless_stream_of_short_ones():
    drive = drive_with(make_request("long", 8000))
    for index in range(50):
        drive.add(make_request(f"short-{index}", 64))
        assert drive.step().num_scheduled_tokens["long"] >= BUDGET // 2 - index - 1


def test_sequences_that_decode_behind_a_long_prompt_decode_in_each_step():
    drive = drive_with(make_request("long", 8000))
    drive.add(make_request("short", 10, max_tokens=20))
    drive.step()
    for _ in range(15):
        assert drive.step().num_scheduled_tokens == {"long": BUDGET - 1, "short": 1}


def test_behind_two_long_prompts_a_short_one_has_a_quarter_of_the_budget():
    drive = drive_with(make_request("a", 500))
    drive.add(make_request("b", 300))
    drive.step()
    drive.add(make_request("short", 30))
    assert drive.step().num_scheduled_tokens == {"a": 64, "b": 34, "short": 30}


@pytest.mark.parametrize(
    "waiting",
    [[], [("equal", 8000 - BUDGET)], [("longer", 9000)]],
    ids=["nobody waits", "an equal one waits", "a longer one waits"],
)
def test_a_long_prompt_has_whole_steps_if_no_shorter_one_waits(waiting):
    drive = drive_with(make_request("long", 8000))
    drive.add(*[make_request(*request) for request in waiting])
    assert drive.step().num_scheduled_tokens == {"long": BUDGET}


def test_of_two_equal_prompts_that_run_the_first_has_the_step():
    pool = SimpleNamespace(waiting=())
    shares = PromptShares(pool, max_num_seqs=8)
    for behind, first in ((200, BUDGET), (199, BUDGET // 2)):
        counts = shares.limit(np.array([200, behind], np.int32), BUDGET, BUDGET)
        assert counts[0] == first


def test_a_request_that_is_alone_has_larger_steps_and_shares_smaller_ones():
    drive = drive_with(make_request("long", 8000), max_num_shared_tokens=32)
    assert drive.step().num_scheduled_tokens == {"long": BUDGET}
    drive.add(make_request("short", 10, max_tokens=3))
    assert drive.step().num_scheduled_tokens == {"long": 22, "short": 10}
    assert [drive.step().num_scheduled_tokens["long"] for _ in range(3)] == [31, 31, BUDGET]


def test_a_request_of_more_sequences_than_a_shared_step_has_tokens_is_refused():
    request = make_request("b", 8, num_sequences=5)
    drive_with(make_request("a", 8), request, max_num_shared_tokens=4)
    assert request.status is RequestStatus.FINISHED_IGNORED


def test_a_long_prompt_has_whole_steps_if_there_is_no_row_for_another():
    drive = drive_with(make_request("long", 8000), max_num_seqs=1)
    drive.add(make_request("short", 10))
    assert drive.step().num_scheduled_tokens == {"long": BUDGET}
