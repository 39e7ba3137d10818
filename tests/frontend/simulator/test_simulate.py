"""The program as a whole: the same bytes twice, plans, refusals."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from frontend.simulator.metrics import as_plan_table, as_table
from frontend.simulator.options import EngineOptions, FleetOptions, StepTimeOptions, TraceOptions
from frontend.simulator.simulation import Scenario, fewest_replicas, plan, simulate
from scripts.simulate import main
from tests.frontend.simulator.recorded_runs import Asked, record_run

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


def test_the_document_agrees_with_itself():
    document = simulate(SMALL)
    requests, engines = document["requests"], document["engines"]
    other = dataclasses.replace(SMALL, trace=dataclasses.replace(SMALL.trace, seed=5))

    assert simulate(other)["requests"] != requests
    assert requests["num_finished"] == document["trace"]["num_requests"] == 120
    assert requests["ttft_s"]["p50"] <= requests["ttft_s"]["p99"] <= requests["ttft_s"]["max"]
    assert requests["tpot_s"]["max"] <= requests["longest_gap_s"]["max"] * (1 + 1e-9)
    assert 0 < engines["utilisation"] < 1
    assert 0 < engines["cache_hit_rate"]["all"] < 1
    assert 0 < engines["blocks"]["mean_share_used"] < engines["blocks"]["peak_share_used"] <= 1
    assert engines["requests_an_engine"]["mean"] == 60
    assert "SLO attainment" in as_table(document)


def test_a_file_trace_of_each_format_is_served(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 3, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 900, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 9]}\n'
    )
    scenario = dataclasses.replace(
        SMALL, trace=TraceOptions(trace=path, trace_format="mooncake"), fleet=FleetOptions()
    )
    engines = simulate(scenario)["engines"]

    assert engines["cache_hit_rate"]["all"] == pytest.approx(1024 / 2300)


def test_more_replicas_are_needed_for_a_tighter_slo():
    def needed(ttft_ms):
        scenario = dataclasses.replace(
            SMALL,
            trace=TraceOptions(rate=60.0, num_requests=150, prompt_len="2000", output_len="20"),
            fleet=FleetOptions(slo_ttft_ms=ttft_ms),
        )
        trials = fewest_replicas(scenario, 2048, max_replicas=16)
        counts = [trial["replicas"] for trial in trials if trial["why_not"] is None]
        assert counts
        # found by halving: none below was left untried that could hold
        below = [trial["replicas"] for trial in trials if trial["why_not"] is not None]
        assert not below or max(below) == min(counts) - 1
        return min(counts)

    counts = [needed(ttft_ms) for ttft_ms in (2000.0, 300.0, 80.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_plan_sweeps_budgets_in_processes_and_says_which_is_best():
    one, two = (plan(SMALL, (256, 1024), 4, processes) for processes in (1, 2))

    assert json.dumps(one) == json.dumps(two)
    assert {row["max_num_batched_tokens"] for row in one["tried"]} == {256, 1024}
    assert one["best"]["why_not"] is None
    assert f"fewest: {one['best']['replicas']} replicas" in as_plan_table(one)


def test_a_plan_with_nothing_within_the_slo_says_so():
    scenario = dataclasses.replace(SMALL, fleet=FleetOptions(slo_ttft_ms=0.001))
    document = plan(scenario, (256,), 2, 1)

    assert document["best"] is None
    assert [row["replicas"] for row in document["tried"]] == [1, 2]
    assert "p99 TTFT above the SLO" in as_plan_table(document)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("run --rate 0", "the rate is 0.0 requests a second"),
        ("run --engines 0", "for --engines. Must be >= 1"),
        ("run --trace x", "--trace is given without --trace-format"),
        ("run --trace-format azure", "--trace-format is given without --trace"),
        ("run --burstiness 3", "--burstiness is 3.0 and does nothing, as --arrivals is not gamma"),
        ("run --think 3", "--think is 3.0 and does nothing, as --turns is 1"),
        ("run --noise", "--noise is True and does nothing, as a roofline has no deviations"),
        ("run --max-num-batched-tokens 0", "max_num_batched_tokens is 0"),
        (
            "run --router-view-ms 5",
            "--router-view-ms is 5.0 and does nothing, as --router round-robin",
        ),
        ("run --slo-budget", "--slo-budget is True and does nothing, as there is no --slo-tpot-ms"),
        ("plan --rate 3", "there is no SLO"),
        ("plan --slo-ttft-ms 5 --engines 3", "a plan looks for it; give --max-replicas"),
        ("plan --slo-ttft-ms 5 --max-num-batched-tokens 9", "is 9, and a plan looks for it"),
        ("run --wrong", "--wrong"),
        ("verify /no/such/file", "cannot read /no/such/file"),
    ],
)
def test_wrong_options_end_with_status_2_and_one_line(options, message, capsys):
    assert main(options.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("simulate: ")
    assert message in line


def test_a_token_budget_that_follows_the_slo_keeps_more_requests_within_it():
    fleet = FleetOptions(slo_ttft_ms=1000.0, slo_tpot_ms=15.0)
    trace = TraceOptions(
        rate=13, prompt_len="lognormal:1200:1.0:16000", output_len="100", num_requests=200
    )
    attained = []
    for slo_budget in (False, True):
        engine = EngineOptions(max_num_batched_tokens=8192, slo_budget=slo_budget)
        document = simulate(Scenario(trace=trace, engine=engine, fleet=fleet))
        attained.append(document["requests"]["goodput"]["slo_attainment"])
    assert attained[0] < attained[1]


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
    for noise in (False, True, None):
        scenario = dataclasses.replace(
            SMALL, step_times=StepTimeOptions(fitted=path, noise=noise), fleet=FleetOptions()
        )
        document = simulate(scenario)
        assert document["step_model"]["model"] == "fitted"
        assert ("noise_seed" in document["step_model"]) == (noise is not False)
        assert document["requests"]["num_finished"] == 120


def test_a_table_says_what_was_simulated_defaults_too(capsys):
    plan_of = "plan --num-requests 20 --slo-ttft-ms 900 --budget 512 --processes 1"
    assert main([*plan_of.split(), "--no-prefix-caching"]) == 0
    head, *lines = capsys.readouterr().err.splitlines()
    for words in (
        "llama-3.1-8b on h200",
        "20 requests, 4 a second, poisson arrivals",
        "prompts of log-uniform:32:2048 tokens, answers of log-uniform:16:512",
        "--slo-ttft-ms 900",
        "--no-prefix-caching",
    ):
        assert words in head
    assert any(line.startswith("busy: share of the time") for line in lines)


def test_a_scenario_names_its_files_instead_of_what_they_replace():
    scenario = Scenario(
        trace=TraceOptions(trace=Path("t.csv"), trace_format="azure", num_requests=7),
        step_times=StepTimeOptions(fitted=Path("steps.jsonl")),
    )
    words = scenario.in_words()
    assert words == "step times of steps.jsonl; requests of t.csv (azure); --num-requests 7"
    pairs = dataclasses.replace(SMALL, trace=TraceOptions(length_pairs=Path("pairs.csv")))
    assert "lengths of pairs.csv" in pairs.in_words()
    assert "prompts of" not in pairs.in_words()


@pytest.mark.parametrize("command", ["run", "fit", "validate"])
def test_a_terminal_gets_no_document_unless_it_asks(command, tmp_path, capsys, monkeypatch):
    path = record_run(tmp_path / "run.jsonl", [Asked(0.05 * index, 20, 9) for index in range(20)])
    arguments = [command, "--num-requests=20"] if command == "run" else [command, str(path)]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(arguments) == 0
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err
    assert command == "run" or str(path) in written.err
    assert main([*arguments, "--json", str(tmp_path / "asked.json")]) == 0
    assert json.loads((tmp_path / "asked.json").read_text())
