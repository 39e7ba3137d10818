"""A draft model in the device's runner: no token changes, and the same model is always right."""

import pytest
from drafted_loop import MOST, DraftedLoop, add_all, answers_of_all
from engine_loop import few_blocks
from fake_device import TRITON_DEVICE, make_operations, make_queue, make_steps
from runners import load_reference, runner_config, spoiled

from engine_core.model_runner.config import DraftConfig
from engine_core.model_runner.gpu import DraftingGPURunner
from kernels.torch.operations import TorchOperations
from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams

pytestmark = pytest.mark.parametrize("ops", ["torch"], indirect=True)


def drafting_runner(reference, num_layers=None, *, ops=None, draft_ops=None, steps=None, **options):
    """Drafts of the model's own first layers, or of all of them. Their passes have no padding."""
    ops = ops or make_operations()
    draft_ops = draft_ops or (TorchOperations() if ops.device.type == "cpu" else make_operations())
    draft = load_reference(reference, draft_ops)
    draft = draft if num_layers is None else draft.first_layers(num_layers)
    config = runner_config(
        load_reference(reference, ops),
        ops,
        draft=DraftConfig(draft, draft_ops),
        **{"max_num_drafts": 8 * MOST, "max_num_batched_tokens": 64} | options,
    )
    steps = steps or make_steps()
    return spoiled(DraftingGPURunner(config, steps=steps, queue=make_queue()))


@pytest.mark.parametrize("memory", ["recompute", "swap"])
def test_no_token_depends_on_the_draft_model(make_runner, reference, monkeypatch, memory):
    """Parameters of all kinds, samples, beams, an abort, and blocks so few that requests give
    way."""
    options, swap = few_blocks(reference), memory == "swap"
    plain = DraftedLoop(make_runner(**options), monkeypatch, drafted=False, swap=swap)
    runner = drafting_runner(reference, 1, **options)
    drafted = DraftedLoop(runner, monkeypatch, wanted=None, swap=swap)
    assert answers_of_all(drafted) == answers_of_all(plain)
    assert drafted.scheduler.statistics().num_draft_tokens > 20


def test_drafts_of_the_same_model_are_all_accepted(reference, monkeypatch):
    """Greedy or not: device and host sample with the same noise."""
    loop = DraftedLoop(drafting_runner(reference, **few_blocks(reference)), monkeypatch)
    add_all(loop, 3)
    loop.finish()
    assert loop.num_accepted == loop.num_drafted > 30


@pytest.mark.slow
def test_on_the_real_kernels_all_are_accepted(reference, monkeypatch):
    ops, draft_ops = (TritonOperations(TRITON_DEVICE) for _ in range(2))
    runner = drafting_runner(reference, ops=ops, draft_ops=draft_ops, steps=TritonDeviceSteps())
    loop = DraftedLoop(runner, monkeypatch)
    loop.add("a", [9, 10, 11], SamplingParams(max_tokens=5, temperature=1.0, seed=2))
    loop.add("b", [12] * 9, SamplingParams(max_tokens=5, temperature=0.0))
    loop.finish()
    assert loop.num_accepted == loop.num_drafted > 3
