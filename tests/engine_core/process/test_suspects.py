"""Which deaths count for which requests, and what a request is known by."""

import msgspec
import pytest

from engine_core.observers.step_suspects import fingerprint
from engine_core.process.suspects import Suspects
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

REQUEST = EngineRequest(
    request_id="a", prompt_token_ids=[1, 2], sampling_params=SamplingParams(max_tokens=4, seed=3)
)


def die(suspects, *steps, code=-11, **how):
    for number, step in enumerate(steps):
        suspects.begin_step(number, step)
    suspects.count_death(code, **how)


def test_two_deaths_make_a_suspect_and_one_more_alone_a_refusal():
    suspects = Suspects()
    die(suspects, [1, 2])
    assert not suspects.is_suspect(1)
    die(suspects, [1], [2])  # two steps in flight
    assert suspects.is_suspect(1)
    assert suspects.is_suspect(2)
    die(suspects, [1, 2])
    assert not suspects.refused
    die(suspects, [2])
    assert suspects.refused == {2}


@pytest.mark.parametrize(
    ("code", "counts"),
    [(-9, False), (-15, False), (-11, True), (-6, True), (-7, True), (1, True), (5, True)],
)
def test_a_death_from_outside_does_not_count(code, counts):
    suspects = Suspects()
    for _ in range(3):
        die(suspects, [7], code=code)
    assert suspects.is_suspect(7) is counts
    assert bool(suspects.refused) is counts


def test_a_kill_by_the_oom_killer_counts():
    suspects = Suspects()
    for _ in range(3):
        die(suspects, [7], code=-9, by_oom_killer=True)
    assert suspects.refused == {7}


def test_a_step_that_is_over_killed_nobody():
    suspects = Suspects()
    for _ in range(3):
        suspects.begin_step(4, [7])
        suspects.end_step(4)
        suspects.count_death(-11)
    assert not suspects.is_suspect(7)


def test_more_requests_than_a_slot_has_room_for_are_cut():
    suspects = Suspects()
    for _ in range(2):
        die(suspects, range(10_000), [5])
    assert suspects.is_suspect(0)


def test_a_request_is_known_by_what_it_asks_for():
    def changed(**changes):
        return fingerprint(msgspec.structs.replace(REQUEST, **changes))

    same = fingerprint(REQUEST)
    resumed = SamplingParams(max_tokens=4, seed=9)
    assert changed(request_id="b", output_token_ids=[5], sampling_params=resumed) == same
    assert changed(prompt_token_ids=[1, 3]) != same
    assert changed(sampling_params=SamplingParams(max_tokens=5, seed=3)) != same


def test_what_was_compiled_when_the_engine_died_counts_and_the_steps_requests_do_not():
    suspects = Suspects()
    for _ in range(2):
        suspects.begin_compile(8)
        suspects.begin_compile(9)
        suspects.end_compile(9)
        die(suspects, [1, 2])
    assert suspects.is_suspect(8)
    assert not any(map(suspects.is_suspect, (1, 2, 9)))
    suspects.begin_compile(8)
    die(suspects, [1])
    assert suspects.refused == {8}
    die(suspects, [1])
    die(suspects, [1])
    assert suspects.is_suspect(1), "nothing is noted of the compilations before"
