"""Device runners around a tiny model, beside the host's runner of the same weights."""

import sys
from pathlib import Path

import pytest
import torch

from engine_core.model_runner.cache_layout import plan_cache_layout
from engine_core.model_runner.gpu import GPUModelRunner
from engine_core.model_runner.runner import ModelRunner
from engine_core.models import load_model
from kernels.torch.device_steps import TorchDeviceSteps

sys.path.insert(0, str(Path(__file__).parent))

OPTIONS = {
    "num_blocks": 150,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "max_num_batched_tokens": 96,
    "dtype": torch.float32,
    "eos_token_ids": (7,),
}


@pytest.fixture
def make_device_runner(reference):
    """(options) -> a device runner of the reference's weights, on a late device unless another
    queue is given. What its blocks held before is garbage."""
    from fake_device import LateQueue, PaddedOperations
    from plans import spoil

    def make(*, ops=None, steps=None, queue=None, **options):
        ops = ops or PaddedOperations()
        model = load_model(
            reference.config.to_dict(), reference.state_dict().items(), dtype=torch.float32, ops=ops
        )
        runner = GPUModelRunner(
            model=model,
            ops=ops,
            steps=steps or TorchDeviceSteps(),
            queue=queue or LateQueue(),
            layout=plan_cache_layout(model.kv_cache_spec.sliding_windows),
            **OPTIONS | options,
        )
        spoil(runner.storage.device_tensors)
        spoil(runner.storage.host_tensors)
        return runner

    return make


@pytest.fixture
def make_host_runner(reference, ops):
    """(options) -> today's runner of the same weights."""
    from plans import spoil

    def make(**options):
        model = load_model(
            reference.config.to_dict(), reference.state_dict().items(), dtype=torch.float32, ops=ops
        )
        layout = plan_cache_layout(model.kv_cache_spec.sliding_windows)
        runner = ModelRunner(model=model, ops=ops, layout=layout, **OPTIONS | options)
        spoil(runner.storage.device_tensors)
        spoil(runner.storage.host_tensors)
        return runner

    return make
