"""Counters, budgets and blocks that must add up, whatever the scenario."""

import random
from types import SimpleNamespace

import pytest
from scenario_help import Scenario, blocks_of, fresh_tokens, make_request

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import (
    ModelRunnerOutput,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.startup.scheduler import build_scheduler
from tests.protocol.all_outputs import all_outputs


def test_a_requests_numbers_through_its_life():
    """Waiting, running, preempted, resumed, finished. Proves S002, S003, S009, S026, S113, S127."""
    first = make_request("first", 80, arrival_time=1.5, max_tokens=4)
    second = make_request("second", 80, arrival_time=2.5, max_tokens=3)
    scenario = Scenario(first, second, num_blocks=10)

    def numbers() -> tuple:
        status, num_computed = second.status, second.num_computed_tokens
        return status, num_computed, second.num_tokens, second.num_output_tokens

    assert numbers() == (RequestStatus.WAITING, 0, 80, 0)
    scenario.step()
    assert numbers() == (RequestStatus.RUNNING, 80, 81, 1)
    scenario.step(first=[9])
    assert numbers() == (RequestStatus.PREEMPTED, 0, 81, 1)
    scenario.run_to_end()
    assert numbers()[0] is RequestStatus.FINISHED_LENGTH
    assert numbers()[2:] == (83, 3)
    assert first.output_token_ids == [7, 9, 7, 7]
    assert first.all_token_ids == [*first.prompt_token_ids, 7, 9, 7, 7]
    assert (first.arrival_time, second.arrival_time) == (1.5, 2.5)
    assert (first.account.num_preemptions, second.account.num_preemptions) == (0, 1)
    assert scenario.scheduler.statistics().num_preemptions == 1


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("batching", ["mixed", "prefill-first"])
def test_no_step_exceeds_its_budget_or_the_number_of_sequences(policy, batching):
    """Random prompts over few blocks. Proves S059, S062."""
    chooser = random.Random(1)
    scenario = Scenario(
        scheduling_policy=policy,
        batching=batching,
        num_blocks=30,
        max_num_batched_tokens=50,
        max_num_seqs=5,
    )
    for index in range(40):
        length, most = chooser.randint(1, 120), chooser.randint(1, 60)
        scenario.add(make_request(f"r{index}", length, max_tokens=most))
    fullest = 0
    while scenario.scheduler.has_work():
        plan = scenario.plan()
        fullest = max(fullest, plan.total_num_scheduled_tokens)
        assert plan.total_num_scheduled_tokens == sum(plan.batch.num_scheduled_tokens.tolist())
        assert plan.total_num_scheduled_tokens <= 50
        assert len(plan.batch.req_ids) <= scenario.counts[0] <= 5
        assert all(count > 0 for count in plan.num_scheduled_tokens.values())
        assert len(set(plan.batch.rows.tolist())) == len(plan.batch.req_ids)
        scenario.update(plan)
        scenario.kv_cache.check()
    assert fullest == 50
    finished = {request.num_output_tokens for request in scenario.requests.values()}
    for request in scenario.requests.values():
        assert request.num_output_tokens == request.sampling_params.max_tokens, finished


def test_a_request_has_one_sequence_until_its_prompt_is_computed():
    """Waiting, in chunks of its prompt, and again after a fork was given back. Proves S015."""
    request = make_request("a", 40, num_sequences=3)
    scenario = Scenario(request, max_num_batched_tokens=16)
    numbers = [len(request.sequences)]
    for _ in range(4):
        scenario.update_with_array(scenario.plan())
        numbers.append(len(request.sequences))
    assert numbers == [1, 1, 1, 3, 3]


def test_tokens_and_places_are_given_out_to_the_last_and_anew_in_each_step():
    """What is left is what those before did not take; no sequence gets 0 tokens. Proves S052, S053,
    S054."""
    prompts = {"a": 4, "b": 5, "c": 13, "d": 2, "e": 2}
    scenario = Scenario(
        *[make_request(name, length) for name, length in prompts.items()],
        max_num_batched_tokens=10,
        max_num_seqs=4,
    )
    assert [scenario.step().num_scheduled_tokens for _ in range(4)] == [
        {"a": 4, "b": 5, "c": 1},  # 10 - 4 - 5 are left for the third, and nothing for the fourth
        {"a": 1, "b": 1, "c": 6, "d": 2},  # 10 again; the third leaves the fourth its 2
        {"a": 1, "b": 1, "c": 6, "d": 1},  # a token is left, and no place
        {"a": 1, "b": 1, "c": 1, "d": 1},
    ]
    scenario.abort("b")
    assert scenario.step().num_scheduled_tokens == {"a": 1, "c": 1, "d": 1, "e": 2}
    plan = PlanBuilder(BatchState(1, 8), token_budget=3, step_id=0, now=0.0)
    for num_tokens in (0, 4):
        with pytest.raises(AssertionError):
            plan.add_sequence(SimpleNamespace(row=0), num_tokens)
    plan.add_sequence(SimpleNamespace(row=0), 3)
    assert plan.budget == 0


def test_a_prompt_is_charged_once_and_less_what_the_cache_has():
    """Of 40 tokens 32 are cached, so that eight leave room for eight others; three samples share
    one charge. Proves S055."""
    prompt = fresh_tokens(40)
    scenario = Scenario(make_request("first", prompt, max_tokens=1), max_num_batched_tokens=40)
    scenario.step()
    scenario.scheduler.feedback.choose_budget = lambda _: 16
    scenario.add(make_request("again", prompt, num_sequences=3), make_request("other", 20))
    plan = scenario.plan()
    assert plan.num_scheduled_tokens == {"again": 8, "other": 8}
    numbers = scenario.scheduler.statistics()
    assert (numbers.num_prompt_tokens, numbers.num_cached_prompt_tokens) == (100, 32)


@pytest.mark.parametrize(("num_lookahead_slots", "num_blocks"), [(0, 1), (3, 2), (17, 3)])
def test_slots_behind_the_tokens_are_reserved_for_every_sequence(num_lookahead_slots, num_blocks):
    """Proves S090."""
    scenario = Scenario(make_request("a", 16), num_lookahead_slots=num_lookahead_slots)
    plan = scenario.step()
    assert plan.num_lookahead_slots == num_lookahead_slots
    assert len(blocks_of(plan, "a")) == num_blocks


def test_one_request_may_fill_the_whole_cache_and_wastes_less_than_a_block():
    """Block by block. Proves S138, S177, S178, S183, S186."""
    scenario = Scenario(
        make_request("a", 10, max_tokens=64 - 10 + 1),
        num_blocks=4,
        num_host_blocks=0,
        max_model_len=100,
    )
    while not scenario.requests["a"].is_finished:
        scenario.step()
        statistics, request = scenario.scheduler.statistics(), scenario.requests["a"]
        if not request.is_finished:
            computed = request.num_computed_tokens
            assert statistics.num_blocks_in_use == -(-computed // 16)
            assert 0 <= statistics.num_slots_wasted < 16
    assert scenario.requests["a"].num_output_tokens == 55
    assert scenario.requests["a"].account.num_preemptions == 0


def test_blocks_in_use_cached_and_free_add_up_and_each_sequence_has_a_table_of_its_own():
    """Blocks are taken as a request begins to run; its samples share its table. Proves S136, S137,
    S142, S143."""
    a, b = make_request("a", 40), make_request("b", 20, num_sequences=2)
    scenario = Scenario(a, b, num_blocks=12, num_host_blocks=5)
    cache = scenario.kv_cache

    def numbers() -> tuple[int, ...]:
        on_device = cache.num_blocks_in_use, cache.num_blocks_cached, cache.num_blocks_free
        return *on_device, cache.host.available

    assert (a.status, b.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    assert numbers() == (0, 0, 12, 5)
    plan = scenario.plan()
    assert (a.status, b.status) == (RequestStatus.RUNNING, RequestStatus.RUNNING)
    tables = blocks_of(plan, "a"), blocks_of(plan, "b")
    assert list(map(len, tables)) == [3, 2]
    assert not set(tables[0]) & set(tables[1])
    assert numbers() == (5, 0, 7, 5)
    for sequence in (a.sequences[0], b.sequences[0]):
        with pytest.raises(AssertionError, match="holds blocks already"):
            cache.allocate_cached(sequence, cache.find_cached_prefix(sequence))
    scenario.update_with_array(plan)
    assert [cache.block_ids(sequence) for sequence in b.sequences] == [(tables[1],)] * 2
    scenario.update_with_array(scenario.plan())
    assert cache._blocks_of.keys() == {"a", "b", "b#1"}
    first, second = (cache.block_ids(sequence)[0] for sequence in b.sequences)
    assert first[0] == second[0]
    assert first[1] != second[1]
    scenario.abort("a")
    assert numbers() == (3, 2, 9, 5)
    scenario.abort("b")
    assert cache._blocks_of == {}
    assert scenario.scheduler.statistics().num_blocks_cached == 3


def test_the_public_example_runs_as_written():
    """Proves S068, S233."""
    scheduler = build_scheduler(
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=1, max_model_len=100),
        KVCacheManager(num_blocks=10, block_size=16),
    )

    class Runner:
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            names = plan.batch.req_ids
            assert len(names) == 1, "max_num_seqs is 1"
            return ModelRunnerOutput(req_ids=names, sampled_token_ids=[[7] for _ in names])

    request, runner, tokens = make_request("a", 5, max_tokens=3, client_index=4), Runner(), []
    scheduler.add_request(request)
    scheduler.add_request(make_request("b", 5, max_tokens=2, client_index=4))
    while scheduler.has_work():
        plan = scheduler.schedule()
        outputs = scheduler.update_from_output(plan, runner.execute(plan))
        assert list(outputs) == [4]
        tokens += [token for output in all_outputs(outputs[4]) for token in output.new_token_ids]
    assert tokens == [7, 7, 7, 7, 7]


def test_every_call_of_the_engines_loop_says_what_it_does():
    """Proves S210."""
    for name in (
        "add_request", "schedule", "update_from_output", "finish_requests",
        "update_draft_token_ids", "get_request_counts",
    ):  # fmt: skip
        assert getattr(Scheduler, name).__doc__
