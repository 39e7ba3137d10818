"""Layers with a recurrent state on the device's runner: tables of two groups, graphs with padding,
mixed steps, drafts. The tokens are those of the CPU's runner on the torch backend, alone."""

import random

import pytest
import torch
from drafting_loop import DraftingLoop
from engine_loop import EngineLoop, make_scheduler
from fake_device import LateQueue, PaddedOperations
from recurrent_model import RecurrentModel, V
from runners import runner_config, spoiled
from test_drafts import run

from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.gpu import GPUModelRunner
from kernels.torch.operations import TorchOperations
from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams
from tests.kernels.torch_device_steps import TorchDeviceSteps

CPU = torch.device("cpu")
BLOCKS = {"num_blocks": (40, 40), "num_host_blocks": 0}
LIMITS = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "max_model_len": 64}


def requests_of(lengths, number):
    """No two begin alike: on a GPU none starts behind what another computes in the same step."""
    draw = random.Random(1)
    params = SamplingParams(max_tokens=number, temperature=0.0, ignore_eos=True)
    for at, length in enumerate(lengths):
        yield f"r{at}", [at, *draw.choices(range(V), k=length - 1)], params, 1


def device_runner(ops, steps, queue, *, use_graphs=True):
    config = runner_config(RecurrentModel(), ops, **BLOCKS, **LIMITS, max_num_drafts=12)
    return spoiled(GPUModelRunner(config, steps=steps, queue=queue, use_graphs=use_graphs))


def scheduler_for(runner, depth, chunk=24):
    return make_scheduler(
        runner.config.layout, **BLOCKS, **LIMITS, swap=False, depth=depth, max_chunk_size=chunk
    )


def alone(requests):
    """Of each request the tokens that it has on the CPU with nothing beside it."""
    config = runner_config(RecurrentModel(), TorchOperations(), **BLOCKS, **LIMITS)
    runner = spoiled(CPUModelRunner(config))
    loop = EngineLoop(scheduler_for(runner, 1), runner, depth=1)
    for request in requests:
        run(loop, [request], seed=0)
    return loop.tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_graphs_and_mixed_steps_with_padding_give_the_tokens_of_the_cpu(depth):
    requests = list(requests_of([3, 17, 1, 30, 8, 4, 16, 33], 9))
    queue = LateQueue()
    runner = device_runner(PaddedOperations(), TorchDeviceSteps(), queue)
    loop = run(
        EngineLoop(scheduler_for(runner, depth, 7), runner, depth=depth), requests, seed=depth
    )
    assert loop.tokens == alone(requests)
    assert queue.num_replayed > 15


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_on_the_real_kernels_drafts_and_prompts_in_chunks_give_the_tokens_of_the_cpu(
    batch_invariant,
):
    requests, queue = list(requests_of([9, 1], 6)), LateQueue()
    answers = alone(requests)
    ops = TritonOperations(CPU, batch_invariant=batch_invariant)
    runner = device_runner(ops, TritonDeviceSteps(), queue, use_graphs=not batch_invariant)
    scheduler = scheduler_for(runner, 1, 7)
    drafting = DraftingLoop(
        scheduler, runner, depth=1, answers=answers, vocab_size=V, seed=3, most=3
    )
    run(drafting, requests, seed=0)
    assert drafting.tokens == answers
    assert drafting.num_drafted > drafting.num_accepted > 0
    assert queue.num_replayed > 0 or batch_invariant
