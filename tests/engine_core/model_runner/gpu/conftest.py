"""Runners of a late device around a tiny model; `make_runner` makes the CPU's of its weights."""

import sys
from pathlib import Path

import pytest

from engine_core.model_runner.gpu import GPUModelRunner
from tests.kernels.torch_device_steps import TorchDeviceSteps

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def make_device_runner(reference):
    """(options) -> a device runner of the reference's weights, on a late device, or on a GPU if
    `TEST_DEVICE=cuda` names one; on the CPU if a queue of the CPU is given. What its blocks held
    before is garbage."""
    from fake_device import (
        PaddedOperations,
        SynchronousQueue,
        make_operations,
        make_queue,
        make_steps,
    )
    from runners import load_reference, runner_config, spoiled

    def make(*, ops=None, steps=None, queue=None, use_graphs=True, **options):
        queue = queue or make_queue()
        on_host = isinstance(queue, SynchronousQueue)
        ops = ops or (PaddedOperations() if on_host else make_operations())
        config = runner_config(
            load_reference(reference, ops), ops, **{"max_num_batched_tokens": 96} | options
        )
        return spoiled(
            GPUModelRunner(
                config,
                steps=steps or (TorchDeviceSteps() if on_host else make_steps()),
                queue=queue,
                use_graphs=use_graphs,
            )
        )

    return make
