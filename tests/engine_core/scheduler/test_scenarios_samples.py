"""Parallel samples through the scheduler and its cache: all greedy ones are the greedy answer."""

import pytest
from beam_reference import PROMPT, reference, tiny_llama
from scenario_help import Scenario
from tiny_runner import Rows

from engine_core.scheduler import Request
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.protocol.all_outputs import all_outputs

MAX_TOKENS = 14


def samples(count: int) -> Request:
    return Request(
        request_id="samples",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
        num_sequences=count,
    )


def check(request: Request, *before: Request, **settings) -> int:
    """Run to the end and compare. Returns the most blocks in use at a time."""
    scenario, rows = Scenario(*before, request, block_size=4, **settings), Rows()
    tokens: dict[int, list[int]] = {index: [] for index in range(request.num_sequences)}
    most_blocks = 0
    while scenario.scheduler.has_work():
        plan = scenario.plan()
        most_blocks = max(most_blocks, scenario.kv_cache.num_blocks_in_use)
        output = rows.execute(plan, 1)
        clients = scenario.scheduler.update_from_output(plan, output, now=scenario.now)
        for each in (each for client in clients.values() for each in all_outputs(client)):
            if each.request_id == "samples":
                tokens[each.index] += each.new_token_ids
        scenario.kv_cache.check()
    greedy = reference(tiny_llama(), BeamSearchParams(1), MAX_TOKENS, [])[0][0]
    assert tokens == dict.fromkeys(tokens, greedy)
    assert scenario.kv_cache.num_blocks_in_use == 0
    assert bool(request.num_preemptions) == bool(before)
    return most_blocks


def test_samples_share_their_prompt_and_copy_what_they_write_into():
    """Proves S004, S005, S155, S181."""
    assert check(samples(4)) <= 1 + 4 * 4


@pytest.mark.parametrize(
    "settings",
    [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "num_host_blocks": 30}, {}],
)
def test_samples_that_give_way_together_come_back_together(settings):
    """Another request, ahead of them, needs their blocks. Proves S005, S111, S113."""
    before = Request(
        request_id="before",
        prompt_token_ids=[index % 40 for index in range(30)],
        sampling_params=SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True),
    )
    check(samples(3), before, num_blocks=16, **settings)
