"""Layers with a recurrent state on the device's runner: tables of two groups, graphs with padding,
mixed steps, drafts. The tokens are those of the CPU's runner on the torch backend, alone."""

import dataclasses
import itertools
import random

import pytest
import torch
from drafting_loop import DraftingLoop
from engine_loop import EngineLoop, make_scheduler
from fake_device import LateQueue, PaddedOperations
from recurrent_model import HEAD, HEADS, RecurrentModel, V
from runners import runner_config, spoiled
from test_drafts import run

from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.gpu import GPUModelRunner
from engine_core.startup.runner_spec import profile_steps
from kernels.torch.operations import TorchOperations
from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams
from tests.gpu.device import DEVICE
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
        runner.config.layout,
        **BLOCKS,
        **LIMITS,
        swap=False,
        depth=depth,
        max_chunk_size=chunk,
        computes_in_order=depth == 1,
    )


class Unordered(PaddedOperations):
    """As on a GPU no request's program waits for another's: the last one comes first."""

    def convolve(self, x_TC, params, cache, metadata):
        out_TC = torch.full_like(x_TC, torch.nan)
        for at, one in _last_first(metadata):
            out_TC[at] = super().convolve(x_TC[at], params, cache, one)
        return out_TC

    def recur(self, qkv_TC, a_TN, b_TH, params, cache, metadata):
        out_TV = torch.full((len(qkv_TC), HEADS * HEAD), torch.nan)
        for at, one in _last_first(metadata):
            out_TV[at] = super().recur(qkv_TC[at], a_TN[at], b_TH[at], params, cache, one)
        return out_TV


def _last_first(metadata):
    """The tokens of each request that has some, and the step as if there were no other."""
    starts = metadata.query_start_loc_R1.tolist()
    for row, (start, stop) in reversed(list(enumerate(itertools.pairwise(starts)))):
        if start < stop:
            yield (
                slice(start, stop),
                dataclasses.replace(
                    metadata,
                    query_start_loc_R1=torch.tensor([0, stop - start], dtype=torch.int32),
                    seq_lens_R=metadata.seq_lens_R[row : row + 1],
                    block_table_RM=metadata.block_table_RM[row : row + 1],
                ),
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


@pytest.mark.parametrize(
    ("blocks", "swap"), [((60, 60), False), ((20, 14), False), ((20, 14), True)]
)
def test_a_crowd_with_common_beginnings_has_the_tokens_of_the_cpu_without_order(blocks, swap):
    """Samples fork, blocks run out and come back from the host, all with a step in flight."""
    draw, stem = random.Random(2), random.Random(3).choices(range(V), k=30)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    requests = [
        (f"r{at}", [*stem[:length], *draw.choices(range(V), k=1 + at)], params, number)
        for at, (length, number) in enumerate(
            [(30, 1), (30, 1), (16, 3), (30, 1), (9, 1), (30, 3), (16, 1), (30, 1)]
        )
    ]
    sizes = {"num_blocks": blocks, "num_host_blocks": (40, 30)}
    config = runner_config(RecurrentModel(), Unordered(), **sizes, **LIMITS)
    queue = LateQueue()
    runner = spoiled(GPUModelRunner(config, steps=TorchDeviceSteps(), queue=queue))
    scheduler = make_scheduler(
        config.layout, **sizes, **LIMITS, swap=swap, depth=2, computes_in_order=False
    )
    loop = EngineLoop(scheduler, runner, depth=2)
    for name, prompt, params, number in requests:
        loop.add(name, prompt, params, num_sequences=number)
    loop.finish()
    assert loop.tokens == alone(requests)
    assert max(loop.num_cached_tokens.values()) >= 28
    assert queue.num_replayed > 10
    counters = scheduler.pool.counters
    assert (counters.num_preemptions > 0) == (blocks[0] < 60)
    assert (counters.num_preemptions_by_swap > 0) == swap


def test_the_largest_steps_and_the_dummy_ones_before_the_first_request_leave_nothing_behind():
    requests, queue = list(requests_of([9, 1, 20], 6)), LateQueue()
    runner = device_runner(PaddedOperations(), TorchDeviceSteps(), queue)
    for plan in profile_steps(runner.config, num_logprobs=3):
        runner.submit(plan)
        runner.collect()
    runner.warm_up(capture_at_start=True)
    assert len(runner.graphs) == len(runner.graphs.all) == queue.num_captured
    loop = run(EngineLoop(scheduler_for(runner, 2), runner, depth=2), requests, seed=0)
    assert loop.tokens == alone(requests)


@pytest.mark.skipif(DEVICE == "cuda", reason="weights on the CPU; tests/gpu has whole hybrids")
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
