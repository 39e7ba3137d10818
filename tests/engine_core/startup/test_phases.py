"""The clock of the start: phases that add up, and a launch time that the parent can check."""

import json
import subprocess
import sys
import time

import pytest

from engine_core.startup.phases import StartPhases, process_launched_s


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self, s):
        self.s = s

    def __call__(self):
        return self.s


def test_phases_have_no_gaps_and_add_up_to_the_total():
    hands = Hands(100.0)
    clock = StartPhases(launched_s=99.5, now=hands)
    clock.enter("files")
    hands.s = 100.25
    clock.enter("imports")
    hands.s = 101.25
    clock.enter("weights")
    hands.s = 103.25
    clock.enter("serving")
    assert clock.spent_s() == {"imports": 1.5, "files": 0.25, "weights": 2.0}
    assert clock.total_s == 3.75 == sum(clock.spent_s().values())


def test_time_after_the_last_phase_is_not_counted():
    hands = Hands(10.0)
    clock = StartPhases(launched_s=10.0, now=hands)
    hands.s = 11.0
    clock.enter("serving")
    hands.s = 50.0
    assert clock.total_s == 1.0
    assert "serving" not in clock.spent_s()


def test_what_is_read_cannot_be_written():
    clock = StartPhases(launched_s=0.0, now=Hands(1.0))
    clock.enter("files")
    clock.spent_s()["imports"] = 99.0
    assert clock.spent_s() == {"imports": 1.0}


def test_the_launch_lies_between_the_parents_start_and_the_childs_first_line():
    program = (
        "import time; first = time.monotonic();"
        "from engine_core.startup.phases import process_launched_s;"
        "import json; print(json.dumps([process_launched_s(), first]))"
    )
    before_s = time.monotonic()
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    launched_s, first_s = json.loads(printed)
    # a tick of 10 ms is added; the two clocks are read one behind the other
    assert before_s - 1e-4 <= launched_s <= first_s + 0.01


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system does not tell it")
def test_a_thread_that_sleeps_between_two_clocks_does_not_move_the_launch(monkeypatch):
    undisturbed_s = process_launched_s()
    delays_s = iter([0.02, 0.05])
    read_clock = time.clock_gettime

    def read_and_sleep(clock: int) -> float:
        reading_s = read_clock(clock)
        time.sleep(next(delays_s, 0.0))
        return reading_s

    monkeypatch.setattr("time.clock_gettime", read_and_sleep)
    assert process_launched_s() == pytest.approx(undisturbed_s, abs=0.01)


@pytest.mark.parametrize("content", ["", "1 (x) S", "garbage", "1 (x) " + "z " * 40])
def test_a_system_that_does_not_tell_the_launch_starts_the_clock_now(monkeypatch, content):
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: content)
    before_s = time.monotonic()
    assert before_s <= process_launched_s() <= time.monotonic()
