"""The start-up benchmark on a tiny model and a scripted server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import main

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SERVER = f"other={sys.executable} {HERE / 'fake_openai_server.py'} {{port}}"


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    ).save_pretrained(folder)
    return folder


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "scripts/bench.py", "startup", *map(str, arguments)],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )


def test_the_last_line_has_medians_of_the_engine_and_of_the_server(tiny_llama, tmp_path):
    done = bench(
        *("--model", tiny_llama, "--repeat", 1, "--options", "--num-blocks 16"),
        *("--server", SERVER, "--json", tmp_path / "figures.json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "figures.json").read_text()) == result
    ours, other = result["median"]["engine-core"], result["median"]["other"]
    assert 0 < ours["launch_to_ready_s"] < ours["launch_to_first_token_s"]
    assert ours["cpu_to_ready_s"] > 0
    phases_s = sum(value for name, value in ours.items() if name.startswith("phase_"))
    assert 0.5 * ours["launch_to_ready_s"] < phases_s <= ours["launch_to_ready_s"] + 0.01
    assert ours["peak_memory_bytes"] > 50e6
    assert 0 < other["launch_to_ready_s"] < other["launch_to_first_token_s"]


def test_a_server_that_does_not_start_is_reported_and_has_no_figures(tiny_llama):
    done = bench(
        *("--model", tiny_llama, "--repeat", 1, "--options", "--num-blocks 16"),
        *("--server", f"other={sys.executable} -c raise.SystemExit(3) {{port}}"),
    )
    assert done.returncode == 1
    result = json.loads(done.stdout.splitlines()[-1])
    assert "other" in result["failed"]
    assert "other" not in result["median"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--repeat", "0"], '"0" for --repeat. Must be >= 1'),
        (["--server", "other=run --port 1"], "has no {port}"),
        (["--server", "engine-core=run {port}"], "two engines have one name"),
    ],
)
def test_wrong_options_are_refused_with_exit_code_2(capsys, words, complaint):
    assert main(["startup", *words]) == 2
    assert complaint in capsys.readouterr().err
