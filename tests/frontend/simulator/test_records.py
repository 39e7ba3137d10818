"""Recorded runs: replayed to the same decisions, fitted, and foretold."""

import json

import numpy as np
import pytest

from frontend.simulator import SimulationError
from frontend.simulator.replay import as_table, validate, verify
from frontend.simulator.step_trace import StepTrace, fit_step_trace
from tests.frontend.simulator.recorded_runs import Asked, record_run

BUSY = [Asked(0.05 * index, 20 + 7 * (index % 9), 5 + index % 30, 16) for index in range(60)]
TIGHT = [
    Asked(0.02 * index, 30 + index % 5, 60, abort_s=1.0 if index == 3 else None)
    for index in range(8)
]


@pytest.fixture(params=[1, 2])
def depth(request):
    """Steps in flight."""
    return request.param


@pytest.fixture
def busy(tmp_path):
    return record_run(tmp_path / "busy.jsonl", BUSY)


def tampered(path, change):
    """The record with one step changed: the first that `change` accepts."""
    lines = path.read_text().splitlines()
    for place, line in enumerate(lines):
        event = json.loads(line)
        if event.get("event") == "step" and change(event):
            lines[place] = json.dumps(event)
            break
    else:
        raise AssertionError("no step was changed")
    other = path.with_name("tampered.jsonl")
    other.write_text("\n".join(lines) + "\n")
    return other, event["id"]


def test_a_record_replays_to_the_same_decisions(tmp_path, depth):
    path = record_run(tmp_path / "busy.jsonl", BUSY, depth=depth)
    assert ('"event":"plan"' in path.read_text()) == (depth > 1)

    verification = verify(StepTrace(path))

    assert verification.difference is None
    assert verification.num_requests == 60
    assert verification.num_steps > 50


def test_preemptions_aborts_and_idle_times_replay(tmp_path, depth):
    asked = [*TIGHT, Asked(60.0, 20, 3)]
    path = record_run(tmp_path / "tight.jsonl", asked, num_blocks=14, depth=depth)
    text = path.read_text()
    assert '"preempted":["' in text
    assert '"event":"abort"' in text

    assert verify(StepTrace(path)).difference is None


def test_a_record_in_which_a_request_makes_steps_fail_replays_and_is_validated(tmp_path, depth):
    path = record_run(tmp_path / "faulty.jsonl", BUSY, depth=depth, poison="r9")
    assert '"probe"' in path.read_text()
    assert verify(StepTrace(path)).difference is None
    document = validate(StepTrace(path), fit_step_trace(path))
    assert (document["num_requests"], document["num_left_out"]) == (59, 1)


def _other_count(event):
    if max(event["nums"], default=0) < 8:
        return False
    event["nums"][event["nums"].index(max(event["nums"]))] -= 1
    return True


def _other_preemption(event):
    event["preempted"] = ["r0"]
    return event["id"] > 5


def _other_sample(event):
    """A stop that was not there: seen where the next step goes without it."""
    if event["id"] < 5 or not event.get("sampled"):
        return False
    event["sampled"] = [7] * len(event["sampled"])
    return True


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_other_count, "scheduled tokens"),
        (_other_preemption, "preempted requests"),
        (_other_sample, "sequences"),
    ],
)
def test_a_tampered_record_is_found_out_at_its_first_difference(busy, change, what):
    path, step_id = tampered(busy, change)

    difference = verify(StepTrace(path)).difference

    assert difference is not None
    assert what in difference.what
    assert difference.step_id == step_id + (change is _other_sample)
    assert f"step {difference.step_id}: " in str(difference)
    assert difference.recorded != difference.decided


def test_what_is_no_record_or_lacks_settings_is_refused(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(SimulationError, match="cannot read"):
        StepTrace(path)
    path.write_text("hello\n")
    with pytest.raises(SimulationError, match="does not begin like a trace"):
        StepTrace(path)
    path.write_text('{"engine-core trace": 1, "model": "m", "config": {"num_blocks": 3}}\n')
    with pytest.raises(SimulationError, match="does not say block_size, scheduler"):
        StepTrace(path)


def test_a_setting_that_the_scheduler_does_not_have_is_named(busy):
    busy.write_text(busy.read_text().replace('"max_num_seqs":8', '"max_num_seqs":8,"magic":1'))

    with pytest.raises(SimulationError, match="no setting magic"):
        verify(StepTrace(busy))


def test_a_record_without_stop_tokens_cannot_replay_requests_that_may_stop(busy):
    busy.write_text(busy.read_text().replace('"eos_token_ids":[7]', '"eos_token_ids":null'))

    with pytest.raises(SimulationError, match="'r0' may stop at an end-of-sequence token"):
        verify(StepTrace(busy))


def test_a_fit_of_a_record_finds_how_its_steps_were_timed(tmp_path, depth):
    model = fit_step_trace(record_run(tmp_path / "busy.jsonl", BUSY, depth=depth))

    assert model.mean_relative_error < 1e-3
    step, tokens, sequences, *_ = model.coefficients
    assert step == pytest.approx(0.01, rel=0.1)
    assert tokens == pytest.approx(0.001, rel=0.1)
    assert sequences == pytest.approx(0.002, rel=0.1)


def test_the_time_between_two_steps_counts_as_part_of_the_first(tmp_path):
    path = record_run(tmp_path / "slow.jsonl", BUSY, between_s=0.02)

    assert fit_step_trace(path).coefficients[0] == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize("between_s", [0.0, 0.01])
def test_a_simulation_foretells_throughput_and_first_tokens_of_the_record(tmp_path, between_s):
    path = record_run(tmp_path / "run.jsonl", BUSY, between_s=between_s)
    document = validate(StepTrace(path), fit_step_trace(path))

    ratios = document["simulated_to_recorded"]
    assert document["num_requests"] == 60
    assert ratios["output_tokens_per_s"] == pytest.approx(1.0, abs=0.05)
    assert ratios["ttft_p50_s"] == pytest.approx(1.0, abs=0.15)
    assert "ttft_p50_s" in as_table(document)


@pytest.mark.slow
def test_a_record_of_one_load_foretells_another_load(tmp_path):
    """Though other programs disturb the steps: two in three take their time, the third up to four
    times as long."""
    random = np.random.default_rng(5)

    def step_s(tokens, sequences):
        factor = 1.0 if random.random() < 2 / 3 else random.uniform(1.0, 4.0)
        return factor * (0.004 + 0.0003 * tokens + 0.0003 * sequences)

    def at_rate(rate, count):
        arrivals_s = np.cumsum(random.exponential(1 / rate, count))
        lengths = random.integers([10, 10], [120, 60], (count, 2)).tolist()
        return [Asked(at_s, *both) for at_s, both in zip(arrivals_s.tolist(), lengths, strict=True)]

    quiet = record_run(tmp_path / "quiet.jsonl", at_rate(2, 300), step_s=step_s)
    model = fit_step_trace(quiet)
    for rate, count in ((2, 300), (5, 600), (8, 900)):
        busy = record_run(tmp_path / "busy.jsonl", at_rate(rate, count), step_s=step_s)
        ratios = validate(StepTrace(busy), model)["simulated_to_recorded"]
        for figure in ("output_tokens_per_s", "ttft_p50_s", "tpot_p50_s", "duration_s"):
            assert ratios[figure] == pytest.approx(1.0, abs=0.1), (rate, figure)


def test_requests_that_got_no_token_are_left_out_of_a_validation(tmp_path):
    path = record_run(tmp_path / "run.jsonl", [*BUSY[:12], Asked(0.3, 500, 1)])
    document = validate(StepTrace(path), fit_step_trace(path))

    assert (document["num_requests"], document["num_left_out"]) == (12, 1)
