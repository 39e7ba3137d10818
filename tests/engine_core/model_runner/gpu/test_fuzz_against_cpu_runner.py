"""Every plan of the real scheduler, carried out by the host's runner and by the device's: the same
tokens, log-probabilities and failures, whatever requests ask for and however they are disturbed."""

import random

import pytest
from engine_loop import few_blocks, make_scheduler
from fake_device import make_queue
from same_answers import V, assert_same_answer, draw_params

from engine_core.scheduler import RequestStatus
from tests.engine_core.new_request import new_request

pytestmark = pytest.mark.slow


def draw_request(draw, name, params):
    return new_request(
        request_id=name,
        prompt_token_ids=[draw.randrange(V) for _ in range(draw.randint(1, 40))],
        sampling_params=params,
        num_sequences=1 if params.seed is None else draw.choice([1, 1, 1, 3]),
        eos_token_ids=(7,),
    )


@pytest.mark.parametrize("seed", range(2))
def test_random_lives_of_random_requests_get_the_same_answers(
    make_device_runner, make_runner, reference, seed
):
    draw = random.Random(seed)
    swap = draw.random() < 0.5
    queue, blocks = make_queue(), few_blocks(reference)
    device = make_device_runner(queue=queue, **blocks)
    host = make_runner(**blocks)
    scheduler = make_scheduler(
        device.config.layout,
        **blocks,
        swap=swap,
        max_num_batched_tokens=draw.choice([24, 96]),
        max_num_seqs=8,
        max_model_len=64,
    )
    names, num_steps, num_failures = [], 0, 0
    while len(names) < 16 or scheduler.has_work():
        if len(names) < 16 and draw.random() < 0.7:
            names.append(f"r{len(names)}")
            scheduler.add_request(draw_request(draw, names[-1], draw_params(draw, max_tokens=18)))
        if names and draw.random() < 0.05:
            scheduler.finish_requests(draw.choice(names), RequestStatus.FINISHED_ABORTED)
        plan = scheduler.schedule()
        expected, found = host.execute(plan), device.execute(plan)
        device.rows.check()
        rows = plan.batch.rows
        stops = plan.batch.num_computed_tokens + plan.batch.num_scheduled_tokens
        # both counted the token that they gave to rows that sample
        needs_sampling = stops == device.batch.num_tokens[rows] - 1
        sampled = dict(zip(plan.batch.req_ids, needs_sampling.tolist(), strict=True))
        assert_same_answer(plan, found, expected, sampled)
        num_failures += len(found.failures)
        scheduler.update_from_output(plan, expected)
        num_steps += 1
        assert num_steps < 3000
    assert scheduler.pool.counters.num_preemptions > 0
    assert queue.num_replayed > 20


def test_a_step_with_drafts_is_answered_as_the_cpu_does(make_device_runner, make_runner):
    from test_runner import with_drafts

    mine = with_drafts(make_device_runner(max_num_drafts=4))
    theirs = with_drafts(make_runner())
    assert mine.sampled_token_ids[:2].tolist() == theirs.sampled_token_ids[:2].tolist()
    assert mine.verified_token_ids == theirs.verified_token_ids
    assert [*theirs.verified_token_ids] == ["b"]
