"""A step that brings nothing new costs the same Python work for few sequences and for many."""

import sys
from pathlib import Path

import pytest
import torch
from plans import Drive
from runners import runner_config

import engine_core.model_runner
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import paged_keys
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams

FOLDER = str(Path(engine_core.model_runner.__file__).parent)
V = 50


class CountingModel:
    """The next token is the last one plus one; attends to nothing."""

    spec = ModelSpec(
        layers=paged_keys(1, 4, (None, 8)),
        num_query_heads=2,
        hidden_size=V,
        vocab_size=V,
        max_model_len=64,
    )

    def forward(self, token_ids_T, positions_T, context):
        return torch.nn.functional.one_hot((token_ids_T + 1) % V, V).float()

    def compute_logits(self, hidden_RE):
        return hidden_RE * 100


def lines_run_in_a_step(number, params):
    options = {"num_blocks": 4 * number, "block_size": 16, "max_num_seqs": number}
    ops = TorchOperations()
    runner = CPUModelRunner(runner_config(CountingModel(), ops, **options))
    drive = Drive(runner, **options)
    names = [f"r{index}" for index in range(number)]
    for name in names:
        drive.add(name, [1, 2, 3], params)
    drive.step(dict.fromkeys(names, 3))
    plan = drive.plans.plan(dict.fromkeys(names, 1))
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        output = runner.execute(plan)
    finally:
        sys.settrace(None)
    assert output.sampled_token_ids.tolist() == [5] * number
    return lines


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_k": 5, "temperature": 0.1}]
)
def test_a_steady_step_runs_as_many_lines_for_300_sequences_as_for_3(params):
    asked = SamplingParams(max_tokens=30, **params)
    assert lines_run_in_a_step(3, asked) == lines_run_in_a_step(300, asked) > 0


def test_the_runner_is_not_asked_for_names_in_a_steady_step():
    """The rows stand in the plan: the names could be gone."""
    options = {"num_blocks": 20, "block_size": 16, "max_num_seqs": 4}
    ops = TorchOperations()
    runner = CPUModelRunner(runner_config(CountingModel(), ops, **options))
    drive = Drive(runner, **options)
    drive.add("a", [1, 2], SamplingParams(max_tokens=30, temperature=0.0))
    drive.step({"a": 2})
    runner.rows.row_of = runner.rows.requests = None
    assert runner.execute(drive.plans.plan({"a": 1})).sampled_token_ids.tolist() == [4]
