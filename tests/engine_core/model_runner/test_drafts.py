"""Tokens, log-probabilities and ends of requests are the same with drafts and without, whatever is
drafted: bit for bit where a row's bits do not depend on the step.

Proves S032, S101, S215, S220, S226: drafts are verified by a runner."""

import random

import numpy as np
import pytest
from drafting_loop import DraftingLoop
from engine_loop import EngineLoop, few_blocks, make_scheduler
from same_answers import V, draw_params

from engine_core.model_runner.drafts import VerifiedRows


def lives(draw, number):
    """Requests that ask for anything but for beams: (name, prompt, parameters, samples)."""
    for at in range(number):
        prompt = [draw.randrange(V) for _ in range(draw.choice([1, 3, 8, 17, 40]))]
        params = draw_params(draw, max_tokens=draw.randint(2, 20))
        yield f"r{at}", prompt, params, draw.choice([1, 1, 1, 3])


def run(loop, requests, *, seed):
    draw, left = random.Random(seed), list(requests)
    while left:
        if draw.random() < 0.6:
            name, prompt, params, num_sequences = left.pop(0)
            loop.add(name, prompt, params, num_sequences=num_sequences)
        loop.step()
    loop.finish()
    return loop


def scheduler_for(runner, blocks, *, swap=False, depth=1, max_num_batched_tokens=64, **drafts):
    return make_scheduler(
        runner.config.layout,
        **blocks,
        swap=swap,
        depth=depth,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=8,
        max_model_len=64,
        **drafts,
    )


@pytest.mark.parametrize(
    ("ops", "seed"), [("native", 0), ("native", 1), ("torch", 2)], indirect=["ops"]
)
def test_drafts_of_any_kind_change_no_token_and_no_log_probability(
    make_runner, reference, ops, seed
):
    requests = list(lives(random.Random(seed), 24))
    blocks = few_blocks(reference)
    runner = make_runner(**blocks)
    plain = EngineLoop(scheduler_for(runner, blocks, swap=seed % 2 == 1), runner, depth=1)
    run(plain, requests, seed=seed)
    runner = make_runner(**blocks)
    drafting = DraftingLoop(
        scheduler_for(runner, blocks, swap=seed % 2 == 1),
        runner,
        depth=1,
        answers=plain.tokens,
        vocab_size=V,
        seed=seed,
    )
    run(drafting, requests, seed=seed + 1)
    assert drafting.tokens == plain.tokens
    assert drafting.ends == plain.ends
    assert drafting.logprobs == plain.logprobs
    if ops.name != "torch-cpu":
        assert drafting.logprob_bytes == plain.logprob_bytes
    assert drafting.num_drafted > drafting.num_accepted > 100


def verified(*drafts):
    """Rows of one sequence for each of these lists."""
    counts = np.array([1 + len(each) for each in drafts])
    starts = np.cumsum(counts) - counts
    before = [token for each in drafts for token in (-1, *each)]
    offsets = np.arange(len(before)) - np.repeat(starts, counts)
    return VerifiedRows(starts, counts, offsets, np.array(before))


def test_a_draft_counts_only_behind_drafts_that_count_and_before_a_failure():
    rows = verified([5, 6, 7], [], [8, 9], [3])
    chosen = np.array([5, 0, 7, 1, 2, 8, 9, 4, 3, 6])
    expected = [1, 1, 0, 0, 1, 1, 1, 1, 1, 1]
    assert rows.taken(chosen, ()).tolist() == list(map(bool, expected))
    expected[6:8] = 0, 0  # its second row of logits fails
    expected[8:] = 0, 0  # its first
    assert rows.taken(chosen, (6, 8)).tolist() == list(map(bool, expected))
    assert rows.drafts_before() == {1: [5], 2: [5, 6], 3: [5, 6, 7], 6: [8], 7: [8, 9], 9: [3]}
