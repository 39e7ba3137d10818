"""The start-up benchmark on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import main

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


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


def test_the_last_line_has_medians_of_the_daemon(tiny_llama, tmp_path):
    done = bench(
        *("--model", tiny_llama, "--repeat", 1, "--options", "--num-blocks 16"),
        *("--json", tmp_path / "figures.json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "figures.json").read_text()) == result
    ours = result["median"]
    assert 0 < ours["launch_to_ready_s"] < ours["launch_to_first_token_s"]
    assert ours["cpu_to_ready_s"] > 0
    phases_s = sum(value for name, value in ours.items() if name.startswith("phase_"))
    assert 0.5 * ours["launch_to_ready_s"] < phases_s <= ours["launch_to_ready_s"] + 0.01
    assert ours["peak_memory_bytes"] > 50e6


def test_wrong_options_are_refused_with_exit_code_2(capsys):
    assert main(["startup", "--repeat", "0"]) == 2
    assert '"0" for --repeat. Must be >= 1' in capsys.readouterr().err
