"""Sequences that follow a grammar, on the device's runner: the tokens of the CPU's."""

import random

import pytest
from drafting_loop import DraftingLoop
from engine_loop import EngineLoop, few_blocks
from fake_device import TRITON_DEVICE, make_queue
from made_up_grammar import MadeUpGrammar
from same_answers import V
from test_constrained_rows import without_limits
from test_drafts import lives, run, scheduler_for

from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("depth", "reference", "ops"), [(2, "four groups", "native")], indirect=["reference", "ops"]
)
def test_tokens_are_those_of_the_cpu(make_device_runner, make_runner, reference, depth):
    """With a step in flight, graphs, drafts and preemptions."""
    requests = without_limits(lives(random.Random(depth), 24))
    blocks = few_blocks(reference)
    runner = make_runner(**blocks)
    scheduler = MadeUpGrammar(V).lead(scheduler_for(runner, blocks))
    plain = run(EngineLoop(scheduler, runner, depth=1), requests, seed=1)
    queue, grammar = make_queue(), MadeUpGrammar(V)
    runner = make_device_runner(queue=queue, max_num_drafts=40, **blocks)
    scheduler = grammar.lead(scheduler_for(runner, blocks, depth=depth, swap=True))
    drafting = DraftingLoop(
        scheduler,
        runner,
        depth=depth,
        answers=plain.tokens,
        vocab_size=V,
        seed=2,
        holds_back=True,
    )
    run(drafting, requests, seed=3)
    assert drafting.tokens == plain.tokens
    assert drafting.logprobs == plain.logprobs
    assert grammar.num_masks > 50
    assert any(key in runner.graphs for key in runner.graphs.all if key.mode is None)
    assert drafting.num_ahead > 20


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_on_the_real_kernels_the_tokens_are_those_of_the_cpu(make_device_runner, make_runner):
    requests = [
        ("r1", [5, 6, 7], SamplingParams(max_tokens=2, seed=1, repetition_penalty=1.3), 1),
        ("r2", [9] * 9, SamplingParams(max_tokens=2, temperature=0.0, logprobs=2), 1),
        ("r3", [9] * 3, SamplingParams(max_tokens=2, seed=3, top_k=9), 1),
    ]
    blocks = {"num_blocks": 30, "num_host_blocks": 0}
    runner, grammar = make_runner(**blocks), MadeUpGrammar(V)
    scheduler = grammar.lead(scheduler_for(runner, blocks))
    plain = run(EngineLoop(scheduler, runner, depth=1), requests, seed=0)
    assert grammar.follows(requests, plain.tokens)
    runner = make_device_runner(
        ops=TritonOperations(TRITON_DEVICE), steps=TritonDeviceSteps(), **blocks
    )
    scheduler = MadeUpGrammar(V).lead(scheduler_for(runner, blocks))
    device = run(EngineLoop(scheduler, runner, depth=1), requests, seed=0)
    assert (device.tokens, device.logprobs) == (plain.tokens, plain.logprobs)
