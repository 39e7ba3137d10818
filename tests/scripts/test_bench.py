"""Benchmarks run, without torch where they say so, and report every part."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import main
from scripts.benchmarks import growth, scheduler
from scripts.benchmarks.scheduler import BLOCK_SIZE, PROMPT_LEN

ROOT = Path(__file__).parents[2]


def bench(tmp_path, *arguments):
    """Its document and what it says; it fails by itself if torch was imported and must not be."""
    file = tmp_path / "result.json"
    command = [sys.executable, "scripts/bench.py", *map(str, arguments), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == result
    return result, done.stderr


def test_wrong_options_are_refused_with_exit_code_2(capsys):
    assert main(["startup", "--repeat", "0"]) == 2
    assert '"0" for --repeat. Must be >= 1' in capsys.readouterr().err


# ---------------------------------------------------------------------- the scheduler


def test_prompts_share_no_block_and_open_one_by_turns():
    prompts = [list(request.prompt_token_ids) for request in scheduler.make_requests(16)]
    assert len({tuple(prompt[:BLOCK_SIZE]) for prompt in prompts}) == 16
    assert sum((len(prompt) + 5) % BLOCK_SIZE == 5 for prompt in prompts) == 1
    assert min(map(len, prompts)) == PROMPT_LEN


def test_a_quick_run_measures_every_part_of_the_scheduler(tmp_path):
    result, said = bench(tmp_path, "scheduler", "--quick")
    assert scheduler.as_table(result) in said
    assert [row["num_running"] for row in result["decode"]] == [4, 16]
    for row in result["decode"]:
        for part in ("schedule", "update", "step"):
            assert 0 < row[part]["median"] <= row[part]["p99"]
    assert all(value > 0 for value in result["arrival"].values())
    assert all(row["num_bytes"] > 0 for row in result["watching"])


# ---------------------------------------------------------------------- growth


@pytest.mark.slow
def test_a_quick_run_measures_every_case_of_growth_and_draws_it(tmp_path):
    picture = tmp_path / "growth.svg"
    result, said = bench(tmp_path, "growth", "--quick", "--picture", picture)
    assert growth.as_table(result["growth"]) in said
    sizes = {what: [row["size"] for row in rows] for what, rows in result["growth"].items()}
    assert sizes == {what: list(sizes[:2]) for what, (_, sizes) in growth.CASES.items()}
    assert all(row["step_us"] > 0 for rows in result["growth"].values() for row in rows)
    assert picture.read_text().count("<svg") == 1


def test_the_cases_of_growth_are_what_they_say():
    prepared = growth.prepared
    assert prepared("running", 8).scheduler.get_request_counts() == (8, 0)
    assert prepared("waiting", 9).scheduler.get_request_counts() == (64, 9)
    head = prepared("waiting head", 1000)
    head.step()
    assert head.scheduler.get_request_counts() == (64, 1)
    cache = prepared("cache", 1000).kv_cache
    assert cache.num_blocks_cached == cache.num_blocks - cache.num_blocks_in_use
    rows = [{"size": 10, "step_us": 5.0}, {"size": 100, "step_us": 50.0}]
    exponent = growth.as_table({"context": rows}).splitlines()[-1].split()
    assert exponent == ["100", "50", "1.00"]


# ---------------------------------------------------------------------- start-up


@pytest.mark.slow
def test_a_start_has_medians_of_the_daemon(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    options = ("--model", tmp_path / "tiny", "--repeat", 1, "--options", "--num-blocks 16")
    result, _ = bench(tmp_path, "startup", *options)
    ours = result["median"]
    assert 0 < ours["launch_to_ready_s"] < ours["launch_to_first_token_s"]
    assert ours["cpu_to_ready_s"] > 0
    phases_s = sum(value for name, value in ours.items() if name.startswith("phase_"))
    assert 0.5 * ours["launch_to_ready_s"] < phases_s <= ours["launch_to_ready_s"] + 0.01
    assert ours["peak_memory_bytes"] > 50e6


# ---------------------------------------------------------------------- hybrids


def assert_figures(measured):
    """Positive, but for rates of streams: of a difference of two times, which a busy machine may
    turn round."""
    assert all(math.isfinite(value) for value in measured.values())
    assert min(value for name, value in measured.items() if not name.endswith("streams")) > 0


@pytest.mark.slow
def test_a_hybrid_is_measured_with_its_next_turn(tmp_path):
    options = ["--shape", "tiny", "--prompts", "64", "--streams", "2", "--repeat", "1"]
    result, said = bench(tmp_path, "hybrids", *options)
    assert "engine-core" in said
    measured = result["medians"]["engine-core"]
    assert measured.keys() == {"prompt 64", "2 streams", "next turn's first token, s"}
    assert_figures(measured)


@pytest.mark.slow
def test_a_big_model_is_measured_with_its_starts(tmp_path):
    options = ["--shapes", "tiny", "--prompts", "64", "--streams", "2", "--repeat", "1"]
    result, said = bench(tmp_path, "big-models", *options)
    measured = result["models"]["tiny"]["medians"]["engine-core"]
    memory = {"first answer, MB above the file", "all, MB above the file"}
    assert {"prompt 64", "first start, s", "second start, s", *memory} <= {*measured}
    assert_figures(measured)
    assert "tiny" in said
