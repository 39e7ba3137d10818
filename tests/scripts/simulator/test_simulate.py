"""The program as a whole: the same bytes twice, plans, pictures, refusals."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_runs import Asked, record_run

from scripts.simulate import main
from scripts.simulator.errors import SimulationError
from scripts.simulator.options import EngineOptions, FleetOptions, StepTimeOptions, TraceOptions
from scripts.simulator.planner import fewest_replicas, plan
from scripts.simulator.report import as_json, as_plan_table, as_table
from scripts.simulator.simulation import Scenario, simulate

SMALL = Scenario(
    trace=TraceOptions(
        rate=40.0,
        num_requests=120,
        prefixes=3,
        prefix_len=64,
        turns=2.0,
        think=0.5,
        prompt_len="log-uniform:32:256",
        output_len="uniform:4:32",
    ),
    engine=EngineOptions(num_blocks=2000, max_num_batched_tokens=512, max_model_len=4096),
    fleet=FleetOptions(engines=2, router="cache-aware", slo_ttft_ms=50.0, slo_tpot_ms=5.0),
)


def test_the_same_options_give_the_same_bytes_in_another_process_too(tmp_path):
    options = "run --rate 40 --num-requests 80 --turns 2 --think 0.5 --engines 2 --arrivals gamma"
    program = Path(__file__).parents[3] / "scripts" / "simulate.py"
    texts = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, str(program), *options.split(), "--router", "cache-aware"],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["requests"]["num_finished"] == 80


def test_another_seed_gives_another_document():
    other = dataclasses.replace(SMALL, trace=dataclasses.replace(SMALL.trace, seed=5))

    assert as_json(simulate(SMALL).document) == as_json(simulate(SMALL).document)
    assert as_json(simulate(SMALL).document) != as_json(simulate(other).document)


def test_the_document_agrees_with_itself():
    document = simulate(SMALL).document
    requests, engines = document["requests"], document["engines"]

    assert requests["num_finished"] == document["trace"]["num_requests"] == 120
    assert requests["ttft_s"]["p50"] <= requests["ttft_s"]["p99"] <= requests["ttft_s"]["max"]
    assert requests["tpot_s"]["max"] <= requests["longest_gap_s"]["max"] * (1 + 1e-9)
    assert 0 < engines["utilisation"] < 1
    assert 0 < engines["cache_hit_rate"]["all"] < 1
    assert 0 < engines["blocks"]["mean_share_used"] < engines["blocks"]["peak_share_used"] <= 1
    assert engines["requests_an_engine"]["mean"] == 60
    assert "promises kept" in as_table(document)


@pytest.mark.parametrize("turns", [1.0, 2.0])
@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "cache-aware"])
def test_a_document_does_not_depend_on_whether_pictures_are_drawn(router, turns):
    trace = dataclasses.replace(SMALL.trace, turns=turns, think=0.5 if turns > 1 else 10.0)
    view_ms = 0.0 if router == "round-robin" else 70.0
    fleet = dataclasses.replace(SMALL.fleet, router=router, router_view_ms=view_ms)
    scenario = dataclasses.replace(SMALL, trace=trace, fleet=fleet)

    whole = as_json(simulate(scenario, with_timeline=True).document)

    assert as_json(simulate(scenario).document) == whole


def test_a_file_trace_of_each_format_is_served(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 3, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 900, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 9]}\n'
    )
    scenario = dataclasses.replace(
        SMALL, trace=TraceOptions(trace=path, trace_format="mooncake"), fleet=FleetOptions()
    )
    engines = simulate(scenario).document["engines"]

    assert engines["cache_hit_rate"]["all"] == pytest.approx(1024 / 2300)


def test_more_replicas_are_needed_for_shorter_promises():
    def needed(ttft_ms):
        scenario = dataclasses.replace(
            SMALL,
            trace=TraceOptions(rate=60.0, num_requests=150, prompt_len="2000", output_len="20"),
            fleet=FleetOptions(slo_ttft_ms=ttft_ms),
        )
        trials = fewest_replicas(scenario, 2048, max_replicas=16)
        counts = [trial.replicas for trial in trials if trial.holds]
        assert counts
        # found by halving: none below was left untried that could hold
        below = [trial.replicas for trial in trials if not trial.holds]
        assert not below or max(below) == min(counts) - 1
        return min(counts)

    counts = [needed(ttft_ms) for ttft_ms in (2000.0, 300.0, 80.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_plan_sweeps_budgets_in_processes_and_says_which_is_best():
    one, two = (plan(SMALL, (256, 1024), 4, processes) for processes in (1, 2))

    assert as_json(one) == as_json(two)
    assert {row["max_num_batched_tokens"] for row in one["tried"]} == {256, 1024}
    assert one["best"]["holds"]
    assert f"fewest: {one['best']['replicas']} replicas" in as_plan_table(one)


def test_a_plan_that_nothing_holds_says_so():
    scenario = dataclasses.replace(SMALL, fleet=FleetOptions(slo_ttft_ms=0.001))
    document = plan(scenario, (256,), 2, 1)

    assert document["best"] is None
    assert [row["replicas"] for row in document["tried"]] == [1, 2]
    assert "first tokens too late" in as_plan_table(document)


def test_a_plan_without_a_promise_is_refused():
    scenario = dataclasses.replace(SMALL, fleet=FleetOptions())
    with pytest.raises(SimulationError, match="nothing is promised"):
        plan(scenario, (256,), 2, 1)


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    status = main(
        f"run --num-requests 30 --json {tmp_path / 'a.json'} --pictures {tmp_path / 'p'}".split()
    )

    assert status == 0
    names = sorted(path.name for path in (tmp_path / "p").iterdir())
    expected = ["batch-composition", "blocks-in-use", "latency-cdfs", "queues"]
    assert names == [f"{name}.png" for name in expected]
    assert all(path.read_bytes()[1:4] == b"PNG" for path in (tmp_path / "p").iterdir())
    assert main(f"run --num-requests 30 --json {tmp_path / 'b.json'}".split()) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("run --rate 0", "the rate is 0.0 requests a second"),
        ("run --engines 0", "--engines is 0, it must be from 1"),
        ("run --trace x", "--trace is given without --trace-format"),
        ("run --trace-format azure", "--trace-format is given without --trace"),
        ("run --burstiness 3", "--burstiness is 3.0 and does nothing, as --arrivals is not gamma"),
        ("run --think 3", "--think is 3.0 and does nothing, as --turns is 1"),
        ("run --seed -1", "--seed is -1"),
        ("run --noise", "--noise needs --fitted"),
        ("run --max-num-batched-tokens 0", "max_num_batched_tokens is 0"),
        ("run --slo-ttft-ms 0", "--slo-ttft-ms is 0"),
        (
            "run --router cache-aware --router-view-ms -1",
            "--router-view-ms is -1.0, it must be at least 0",
        ),
        ("run --router-view-ms 5", "--router-view-ms is 5.0 and does nothing with --router round"),
        ("plan --rate 3", "nothing is promised"),
        ("plan --slo-ttft-ms 5 --budget 0", "--budget is [0]"),
        ("run --wrong", "--wrong"),
        ("verify /no/such/file", "cannot read /no/such/file"),
    ],
)
def test_wrong_options_end_with_status_2_and_one_line(options, message, capsys):
    assert main(options.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("simulate: ")
    assert message in line


def test_verify_fit_and_validate_run_from_the_command_line(tmp_path, capsys):
    asked = [Asked(0.05 * index, 20 + index, 9) for index in range(20)]
    path = record_run(tmp_path / "run.jsonl", asked)

    assert main(["verify", str(path)]) == 0
    assert "every decision is the recorded one" in capsys.readouterr().out
    assert main(["fit", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] > 8
    assert main(["validate", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 20

    path.write_text(path.read_text().replace('"nums":[20]', '"nums":[19]', 1))
    assert main(["verify", str(path)]) == 1
    assert "scheduled tokens differ" in capsys.readouterr().out


def test_a_run_takes_step_times_from_a_record(tmp_path):
    asked = [Asked(0.05 * index, 20 + index, 9) for index in range(20)]
    path = record_run(tmp_path / "run.jsonl", asked)
    for noise in (False, True):
        scenario = dataclasses.replace(
            SMALL, step_times=StepTimeOptions(fitted=path, noise=noise), fleet=FleetOptions()
        )
        document = simulate(scenario).document
        assert document["step_model"]["model"] == "fitted"
        assert document["requests"]["num_finished"] == 120
