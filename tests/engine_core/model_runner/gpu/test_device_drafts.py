"""Drafts on the device's runner, with a step in flight and none: tokens of the CPU's without."""

import random

import pytest
from drafting_loop import DraftingLoop
from engine_loop import EngineLoop, few_blocks
from fake_device import TRITON_DEVICE, make_queue
from same_answers import V
from test_drafts import lives, run, scheduler_for

from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("depth", "reference", "ops"),
    [(1, "one group", "native"), (2, "four groups", "native")],
    indirect=["reference", "ops"],
)
def test_tokens_are_those_of_the_cpu_without_drafts(
    make_device_runner, make_runner, reference, depth
):
    requests, blocks = list(lives(random.Random(depth), 24)), few_blocks(reference)
    runner = make_runner(**blocks)
    plain = run(EngineLoop(scheduler_for(runner, blocks), runner, depth=1), requests, seed=1)
    queue = make_queue()
    runner = make_device_runner(queue=queue, max_num_drafts=40, **blocks)
    drafting = DraftingLoop(
        scheduler_for(runner, blocks, depth=depth, swap=depth == 2),
        runner,
        depth=depth,
        answers=plain.tokens,
        vocab_size=V,
        seed=2,
        holds_back=True,
    )
    run(drafting, requests, seed=3)
    assert drafting.tokens == plain.tokens
    assert drafting.ends == plain.ends
    assert drafting.logprobs == plain.logprobs
    assert drafting.num_drafted > drafting.num_accepted > 50
    assert queue.num_replayed > 20
    assert drafting.num_ahead > 20 or depth == 1


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_on_the_real_kernels_the_tokens_are_those_of_the_cpu(make_device_runner, make_runner):
    requests = [
        ("a", [5, 6, 7], SamplingParams(max_tokens=6, seed=1, repetition_penalty=1.3), 1),
        ("b", [9] * 9, SamplingParams(max_tokens=4, temperature=0.0, logprobs=2), 1),
    ]
    blocks = {"num_blocks": 30, "num_host_blocks": 0}
    runner = make_runner(**blocks)
    plain = run(EngineLoop(scheduler_for(runner, blocks), runner, depth=1), requests, seed=0)
    runner = make_device_runner(
        ops=TritonOperations(TRITON_DEVICE),
        steps=TritonDeviceSteps(),
        max_num_drafts=8,
        **blocks,
    )
    drafting = DraftingLoop(
        scheduler_for(runner, blocks), runner, depth=1, answers=plain.tokens, vocab_size=V, seed=5
    )
    run(drafting, requests, seed=0)
    assert (drafting.tokens, drafting.logprobs) == (plain.tokens, plain.logprobs)
    assert drafting.num_drafted > drafting.num_accepted > 0
