"""README.md is short, and its figures are those of the raw results."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())


def raw(name: str) -> dict:
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())


def test_it_is_read_in_a_minute_and_begins_with_two_commands():
    assert len(README.splitlines()) <= 80
    commands = README.partition("```console\n")[2].splitlines()[:2]
    assert [command.partition("#")[0].strip() for command in commands] == ["make demo", "make test"]


def test_throughput_and_start_are_those_of_the_comparison():
    medians = raw("compare_avx512_zen4_ahead")["medians"]
    ours, vllm, q4 = (medians[name]["W1"]["output_tok_s"] for name in ("fp32", "vllm", "q4"))
    ready = [medians[name]["start"]["launch_to_ready_s"] for name in ("fp32", "vllm")]
    assert f"{ours:.0f} tokens a second for 64 requests where vLLM has {vllm:.0f}" in WORDS
    assert f"ready {ready[0]:.1f} s after launch where vLLM needs {ready[1]:.0f} s" in WORDS
    assert f"; {q4:.0f} in the file's own Q4_1" in WORDS


def test_kills_and_what_became_of_requests_are_those_of_the_chaos_run():
    chaos = raw("chaos")
    kills = sum(count for name, count in chaos["faults_of_the_daemon"].items() if "kill" in name)
    clients = chaos["num_processes"] * chaos["clients_per_process"]
    assert (chaos["lost"], chaos["wrong"], chaos["time_s"]) == (0, 0, 300)
    assert (
        f"killed {kills} times under {chaos['requests']:,} requests of {clients} clients" in WORDS
    )
    assert f"{chaos['resumed_requests']:,} went on where they stopped" in WORDS


def test_the_other_figures_are_those_of_their_runs():
    first = raw("restart_q4")["median_first_token_s"]
    assert f"in {first['with']:.2f} s in place of {first['without']:.2f} s" in WORDS
    overhead = raw("structured_outputs")["figures"]["wall overhead, %"]
    assert f"{overhead} % of a step's time" in WORDS
    ratios = [load["foretold_to_measured"] for load in raw("fleet_real")["loads"]]
    worst = {name: max(abs(each[name] - 1) for each in ratios) * 100 for name in ratios[0]}
    assert worst["output_tokens_per_s"] < 0.1 and f"{worst['ttft_p50_s']:.0f} %" == "8 %"
    assert "of two real engines it foretold throughput to 0.1 %" in WORDS
    assert len(raw("fleet_real")["loads"][0]["foretold"]["requests_an_engine"]) == 2
