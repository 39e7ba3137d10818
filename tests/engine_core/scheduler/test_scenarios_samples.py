"""Parallel samples through the scheduler and its cache: all greedy ones are the greedy answer."""

import pytest
from beam_reference import PROMPT, reference, tiny_llama
from scenario_help import Scenario
from tiny_runner import Rows

from engine_core.scheduler import Request, RequestStatus
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.new_request import new_request
from tests.protocol.all_outputs import all_outputs

MAX_TOKENS = 14


def samples(count: int) -> Request:
    return new_request(
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
    assert bool(request.account.num_preemptions) == bool(before)
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
    before = new_request(
        request_id="before",
        prompt_token_ids=[index % 40 for index in range(30)],
        sampling_params=SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True),
    )
    check(samples(3), before, num_blocks=16, **settings)


def aborted(scenario: Scenario, *indexes: int) -> None:
    for index in indexes:
        scenario.scheduler.finish_sample("samples", index, RequestStatus.FINISHED_ABORTED)
    scenario.scheduler.check()


def step(scenario: Scenario, rows: Rows) -> list:
    """Outputs of samples that ended in this step, and the name of the request if it did."""
    plan = scenario.plan()
    clients = scenario.scheduler.update_from_output(plan, rows.execute(plan, 1), now=scenario.now)
    scenario.scheduler.check()
    scenario.kv_cache.check()
    ends = [
        (output.index, output.finish_reason)
        for client in clients.values()
        for output in all_outputs(client)
        if output.finished
    ]
    return ends + [name for client in clients.values() for name in client.finished_req_ids]


def test_a_sample_that_is_ended_gives_its_row_and_blocks_back_while_the_others_go_on():
    scenario, rows = Scenario(samples(3), block_size=4), Rows()
    for _ in range(8):
        step(scenario, rows)
    num_blocks = scenario.kv_cache.num_blocks_in_use
    aborted(scenario, 1)
    assert scenario.kv_cache.num_blocks_in_use < num_blocks
    request = scenario.requests["samples"]
    assert [seq.index for seq in request.unfinished if seq.row is not None] == [0, 2]
    assert step(scenario, rows) == [(1, "abort")]
    aborted(scenario, 1, 7, -1)  # it has ended, and there are no others
    ends = []
    while scenario.scheduler.has_work():
        ends += step(scenario, rows)
    assert ends == [(0, "length"), (2, "length"), "samples"]
    assert scenario.kv_cache.num_blocks_in_use == 0


def test_a_request_ends_with_its_last_sample():
    scenario, rows = Scenario(samples(2), block_size=4), Rows()
    for _ in range(3):
        step(scenario, rows)
    aborted(scenario, 0, 1)
    assert step(scenario, rows) == [(0, "abort"), (1, "abort"), "samples"]
    assert not scenario.scheduler.has_work()
    assert scenario.kv_cache.num_blocks_in_use == 0


@pytest.mark.parametrize("index", [0, 2])
def test_a_sample_is_ended_as_soon_as_it_exists(index):
    scenario, rows = Scenario(samples(3), block_size=4), Rows()
    aborted(scenario, index, index)
    assert step(scenario, rows) == [(index, "abort")]
    assert len(scenario.requests["samples"].unfinished) == 2


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_sample_that_was_preempted_is_ended_with_its_host_blocks(mode, index):
    before = new_request(
        request_id="before",
        prompt_token_ids=[index % 40 for index in range(30)],
        sampling_params=SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True),
    )
    settings = {"preemption_mode": mode, "num_host_blocks": 30 * (mode == "swap")}
    scenario, rows = Scenario(before, samples(3), block_size=4, num_blocks=16, **settings), Rows()
    request = scenario.requests["samples"]
    while not request.account.num_preemptions:
        step(scenario, rows)
    num_queued = scenario.scheduler.statistics().num_queued_tokens
    aborted(scenario, index)
    assert scenario.scheduler.statistics().num_queued_tokens < num_queued
    ends = []
    while scenario.scheduler.has_work():
        ends += step(scenario, rows)
    assert [end for end in ends if end == (index, "abort")] == [(index, "abort")]
    assert ends[-1] == "samples"
    assert scenario.kv_cache.host.num_pinned == 0
    assert scenario.kv_cache.num_blocks_in_use == 0
