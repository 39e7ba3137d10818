"""The whole loop with a step in flight on a late device against one step at a time on the host.

Random arrivals, aborts, stops at any token, preemptions by recompute and by swap, samples, beams,
rows that wait for the host: each sequence gets the same tokens and the same end.
"""

import random

import pytest
from engine_loop import EngineLoop, few_blocks, make_scheduler
from fake_device import make_queue
from same_answers import V, draw_params

from protocol.sampling import BeamSearchParams, SamplingParams

pytestmark = pytest.mark.slow


def requests_of(draw, number):
    requests = []
    for at in range(number):
        prompt = [draw.randrange(V) for _ in range(draw.choice([1, 3, 8, 17, 40]))]
        options, params = {}, draw_params(draw, max_tokens=draw.randint(1, 20))
        kind = draw.random()
        if kind < 0.15:
            options["num_sequences"] = 3
        elif kind < 0.25:
            width = draw.choice([2, 3])
            options = {"num_sequences": width, "beam_search": BeamSearchParams(beam_width=width)}
            params = SamplingParams(max_tokens=draw.randint(1, 10), temperature=0.0)
        requests.append((f"r{at}", prompt, params, options))
    return requests


def run(loop, requests, *, seed, num_aborts):
    """Requests arrive at random steps. Returns the tokens and ends of those that were not aborted,
    and what the others had got, which depends on when."""
    draw, aborted, left = random.Random(seed), set(), list(requests)
    while left:
        if draw.random() < 0.6:
            name, prompt, params, options = left.pop(0)
            loop.add(name, prompt, params, **options)
        if len(aborted) < num_aborts and draw.random() < 0.1:
            name = requests[draw.randrange(len(requests))][0]
            if name not in {each[0] for each in left}:
                loop.abort(name)
                aborted.add(name)
        loop.step()
    loop.finish()
    return aborted


@pytest.mark.parametrize(("seed", "swap"), [(0, False), (1, True)], ids=["recompute", "swap"])
def test_each_sequence_gets_the_tokens_that_it_gets_one_step_at_a_time(
    make_device_runner, make_runner, reference, seed, swap
):
    draw = random.Random(seed)
    requests = requests_of(draw, 30)
    budget = draw.choice([24, 96])
    loops, aborted, queue = [], set(), make_queue()
    for depth in (1, 2):
        blocks = few_blocks(reference)
        runner = make_runner(**blocks) if depth == 1 else make_device_runner(queue=queue, **blocks)
        scheduler = make_scheduler(
            runner.config.layout,
            **blocks,
            swap=swap,
            depth=depth,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            max_model_len=64,
        )
        loops.append(EngineLoop(scheduler, runner, depth=depth))
        aborted |= run(loops[-1], requests, seed=seed, num_aborts=3)
    first, second = loops
    for place in first.ends.keys() | second.ends.keys():
        if place[0] in aborted:
            number = min(len(first.tokens[place]), len(second.tokens[place]))
            assert first.tokens[place][:number] == second.tokens[place][:number]
            continue
        assert first.tokens[place] == second.tokens[place], place
        assert first.ends[place] == second.ends[place]
    assert second.num_ahead > 50
    assert queue.num_replayed > 20
    assert second.scheduler.pool.counters.num_preemptions > 0
