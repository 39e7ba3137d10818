"""EAGLE-3 heads and heads for multi-token prediction in the device's runner: no token changes, and
drafts are the CPU runner's.

Proves S032, S101, S215, S220, S226: these drafts are verified as all are."""

import numpy as np
import pytest
import torch
from drafted_loop import MOST, DraftedLoop, answers_of_all, finish_greedy
from eagle_runners import eagle_reference
from fake_device import TRITON_DEVICE, LateQueue, PaddedOperations, make_queue
from runners import load_reference, runner_config, spoiled

from engine_core.model_runner.config import DraftConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.gpu import DraftingGPURunner
from engine_core.models.loading import load_eagle_head, load_mtp_head
from engine_core.startup.runner_spec import profile_steps
from kernels.torch.operations import TorchOperations
from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams
from tests.engine_core.models import latent_cases, qwen_hybrid_cases
from tests.kernels.torch_device_steps import TorchDeviceSteps
from tests.mtp_heads import PublishedMTP

HYBRID, LATENTS = "qwen3.5", "deepseek-v3, YaRN"
ONE_STATE = "qwen3.5, attention last, tied, biases"
"""One of its three layers has a state, of HYBRID's four three: interpreted kernels are slow."""


def reference_of(name):
    """A tiny model with `head_on`: (our model, operations) -> its head, of random weights."""
    if name == "eagle":
        reference = eagle_reference("llama")
        config, tensors, load = reference.head, reference.head_tensors, load_eagle_head
    else:
        cases = latent_cases if name == LATENTS else qwen_hybrid_cases
        reference = cases.reference_model(name)
        config, load = reference.config.to_dict(), load_mtp_head
        tensors = PublishedMTP(reference).tensors
    return reference, lambda model, ops: load(
        config, tensors.items(), model, dtype=torch.float32, ops=ops
    )


def runner_of(name, ops, *, num_blocks=150, queue=None, use_graphs=False, steps=None):
    """The CPU's runner; with a queue the device's. `ops`: makes operations of model and head."""
    reference, head_on = reference_of(name)
    model, draft_ops = load_reference(reference, ops()), ops()
    options = {"max_num_drafts": 8 * MOST, "max_num_batched_tokens": 96}
    options["draft"] = DraftConfig(head_on(model, draft_ops), draft_ops)
    sizes = runner_config(model, ops(), **options).layout.sizes(num_blocks)
    options |= {"num_blocks": sizes, "num_host_blocks": tuple(2 * size for size in sizes)}
    config = runner_config(model, ops(), **options)
    if queue is None:
        return spoiled(CPUModelRunner(config))
    steps = steps or TorchDeviceSteps()
    return spoiled(DraftingGPURunner(config, steps=steps, queue=queue, use_graphs=use_graphs))


@pytest.mark.parametrize(
    ("name", "num_blocks", "swap"),
    [
        ("eagle", 24, False),
        pytest.param("eagle", 24, True, marks=pytest.mark.slow),
        (HYBRID, 56, False),
    ],
)
def test_tokens_and_drafts_are_the_cpu_runners(monkeypatch, name, num_blocks, swap):
    """Parameters of all kinds, samples, beams, an abort, prefixes that are found, chunks, and
    blocks so few that requests give way; in an order that is not the plan's, as adapters have
    it; with graphs, but beside layers with a state. The CPU's tokens do not depend on the head."""
    queue, seen, is_padded = LateQueue(), [], name != HYBRID
    ops, blocks = PaddedOperations if is_padded else TorchOperations, {"num_blocks": num_blocks}
    device = runner_of(name, ops, queue=queue, use_graphs=is_padded, **blocks)
    monkeypatch.setattr(device.parts, "order", lambda rows: np.argsort(-rows, kind="stable"))
    for runner in (runner_of(name, TorchOperations, **blocks), device):
        loop = DraftedLoop(runner, monkeypatch, wanted=None, swap=swap, chunk=19)
        seen.append((answers_of_all(loop), loop.drafts))
    assert seen[0] == seen[1]
    assert len(loop.drafts) > 20
    assert (loop.scheduler.statistics().num_preemptions > 0) == is_padded
    assert (queue.num_replayed > 9) == is_padded


def test_warming_up_and_the_largest_steps_leave_nothing_behind(monkeypatch):
    """Drafts are those of a runner that did neither."""
    seen = []
    for is_used in (False, True):
        runner = runner_of("eagle", PaddedOperations, queue=LateQueue())
        if is_used:
            runner.warm_up()
            for plan in profile_steps(runner.config, num_logprobs=3):
                runner.execute(plan)
            assert not runner.rows.row_of
        loop = DraftedLoop(runner, monkeypatch)
        loop.add("a", [9] * 30, SamplingParams(max_tokens=20, temperature=1.0, seed=2))
        loop.finish()
        seen.append((loop.tokens, loop.drafts))
    assert seen[0] == seen[1]
    assert sum(len(drafts) for *_, drafts in loop.drafts) > 5


def test_greedy_drafts_bring_no_logits_to_the_host(monkeypatch):
    """Of each row one token and its logit."""
    loop = DraftedLoop(runner_of("eagle", PaddedOperations, queue=LateQueue()), monkeypatch)
    sizes, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda each: (sizes.append(each.numel()), cpu(each))[1]
    )
    finish_greedy(loop)
    assert len(loop.drafts) > 30
    assert 1 < max(sizes) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", ONE_STATE, LATENTS])
def test_on_the_real_kernels_drafts_are_the_torch_backends(monkeypatch, name):
    def triton():
        return TritonOperations(TRITON_DEVICE)

    seen = []
    for ops, steps, queue in (
        (TorchOperations, TorchDeviceSteps(), LateQueue()),
        (triton, TritonDeviceSteps(), make_queue()),
    ):
        runner = runner_of(name, ops, queue=queue, steps=steps)
        loop = DraftedLoop(runner, monkeypatch)
        loop.add("a", [9, 10, 11], SamplingParams(max_tokens=6, temperature=1.0, seed=2))
        loop.add("b", [12] * 9, SamplingParams(max_tokens=5, temperature=0.0))
        loop.finish()
        seen.append((loop.tokens, loop.drafts))
    assert seen[0] == seen[1]
    assert sum(len(drafts) for *_, drafts in loop.drafts) > 5
