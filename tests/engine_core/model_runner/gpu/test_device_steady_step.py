"""A step that brings nothing new costs the same Python work for few sequences and for many."""

import sys
from pathlib import Path

import pytest
from fake_device import LateQueue
from plans import Plans
from runners import runner_config
from test_steady_step import CountingModel

import engine_core.model_runner
from engine_core.model_runner.gpu import GPUModelRunner
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams
from tests.kernels.torch_device_steps import TorchDeviceSteps

FOLDER = str(Path(engine_core.model_runner.__file__).parent)


def lines_run_in_a_step(number, params):
    queue = LateQueue()
    options = {"num_blocks": 4 * number, "block_size": 16, "max_num_seqs": number}
    config = runner_config(
        CountingModel(), TorchOperations(), max_num_batched_tokens=3 * number, **options
    )
    runner = GPUModelRunner(config, steps=TorchDeviceSteps(), queue=queue)
    plans = Plans(num_groups=config.num_groups, **options)
    names = [f"r{index}" for index in range(number)]
    for name in names:
        plans.add(name, [1, 2, 3], params)
    runner.execute(plans.plan(dict.fromkeys(names, 3)))
    runner.execute(plans.plan(dict.fromkeys(names, 1)))  # both record a graph
    plan = plans.plan(dict.fromkeys(names, 1))
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        runner.submit(plan)
        output = runner.collect()
    finally:
        sys.settrace(None)
    assert output.sampled_token_ids.tolist() == [6] * number
    assert (queue.num_captured, queue.num_replayed) == (2, 3)
    return lines


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_k": 5, "temperature": 0.1}]
)
def test_a_steady_step_runs_as_many_lines_for_100_sequences_as_for_3(params):
    params = SamplingParams(max_tokens=50, **params)
    assert lines_run_in_a_step(3, params) == lines_run_in_a_step(100, params)
