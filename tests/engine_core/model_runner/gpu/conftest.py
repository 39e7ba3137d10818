"""Runners of a late device around a tiny model; `make_runner` makes the CPU's of its weights."""

import sys
from pathlib import Path

import pytest

from engine_core.model_runner.gpu import GPUModelRunner
from tests.kernels.torch_device_steps import TorchDeviceSteps

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def make_device_runner(reference):
    """(options) -> a device runner of the reference's weights, on a late device unless another
    queue is given. What its blocks held before is garbage."""
    from fake_device import LateQueue, PaddedOperations
    from runners import load_reference, runner_config, spoiled

    def make(*, ops=None, steps=None, queue=None, use_graphs=True, **options):
        ops = ops or PaddedOperations()
        config = runner_config(
            load_reference(reference, ops), ops, **{"max_num_batched_tokens": 96} | options
        )
        return spoiled(
            GPUModelRunner(
                config,
                steps=steps or TorchDeviceSteps(),
                queue=queue or LateQueue(),
                use_graphs=use_graphs,
            )
        )

    return make
