"""Drafts break no SLO per output token that plain decoding keeps, however dear they are."""

import numpy as np
import pytest

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import ModelRunnerOutput, SchedulerConfig
from engine_core.startup.scheduler import build_scheduler
from protocol.sampling import SamplingParams
from tests.engine_core.new_request import new_request

PLAIN_S, SLO_S, NUM_TOKENS = 0.02, 0.025, 200
TOKEN = 7


class Guess:
    """Drafts whose first `num_right` are accepted."""

    name = "guess"

    def __init__(self, num_right):
        self.num_right = num_right

    def propose(self, tokens, scope, most):
        return [TOKEN if at < self.num_right else 8 for at in range(most)]

    def learn(self, output, scope):
        pass


def answer(plan):
    """Each sequence samples the same token again and again."""
    verified = {
        name: [TOKEN] * (1 + sum(token == TOKEN for token in drafts))
        for name, drafts in plan.scheduled_spec_decode_tokens.items()
    }
    tokens = np.full(len(plan.batch.req_ids), TOKEN, np.int32)
    return ModelRunnerOutput(plan.batch.req_ids, tokens, verified_token_ids=verified)


def serve(num_requests, draft_s, proposer):
    """Seconds per output token of each request, and how many drafts there were. A step takes
    `draft_s(drafts)` longer than one without."""
    config = SchedulerConfig(
        max_num_batched_tokens=4096,
        max_num_seqs=16,
        max_model_len=1024,
        slo_tpot_ms=1000 * SLO_S,
        num_speculative_tokens=8 if proposer else 0,
    )
    scheduler = build_scheduler(
        config, KVCacheManager(num_blocks=900, block_size=16), proposer=proposer
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    for at in range(num_requests):
        scheduler.add_request(
            new_request(request_id=f"r{at}", prompt_token_ids=[at + 9] * 4, sampling_params=params)
        )
    now, first_s, last_s = 0.0, {}, {}
    while scheduler.has_work():
        plan = scheduler.schedule(now=now)
        num_drafts = sum(map(len, plan.scheduled_spec_decode_tokens.values()))
        now += PLAIN_S + draft_s(num_drafts)
        for name in plan.batch.req_ids:
            first_s.setdefault(name, now)
            last_s[name] = now
        scheduler.update_from_output(plan, answer(plan), now=now)
    times = [(last_s[name] - first_s[name]) / (NUM_TOKENS - 1) for name in first_s]
    return times, scheduler.statistics().num_draft_tokens


COSTS = {
    "dear": lambda drafts: 0.02 * drafts,
    "dear together": lambda drafts: 0.0002 * drafts**2,
    "cheap, then a wall": lambda drafts: 0.0001 * drafts + 0.04 * (drafts > 12),
    "cheap": lambda drafts: 0.0002 * drafts,
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("num_requests", "num_right"), [(1, 0), (1, 8), (9, 0), (9, 2)])
def test_no_request_is_slower_than_the_slo_allows(cost, num_requests, num_right):
    times, num_drafts = serve(num_requests, COSTS[cost], Guess(num_right))
    assert max(times) <= SLO_S
    assert num_drafts > 0
    if num_right == 8 and cost == "cheap":
        assert max(times) < PLAIN_S / 2  # and they are used where they are worth it
