"""One request's way through the scheduler, seen from outside: its sequences, its events, what each
plan says of it, what it waits for by its explanation, and the counters."""

import dataclasses
from pathlib import Path

import numpy as np
from scenario_help import Scenario, make_request

from engine_core.kv_cache import CacheCopies
from engine_core.scheduler import ModelRunnerOutput, RequestStatus
from protocol.calls import MAX_LISTED_REQUESTS
from protocol.explanations import WaitReason

CROWD = {"num_blocks": 10, "enable_prefix_caching": False}
"""Two prompts of 80 tokens fill it; the first one's next token takes blocks of the second."""


# ---------------------------------------------------------------------- a request as a group


def test_sequences_have_a_status_and_a_request_is_finished_when_all_are():
    """Proves S006, S008, S013."""
    request = make_request("r", 20, num_sequences=3, eos_token_ids=[9])
    scenario = Scenario(request, max_num_batched_tokens=16)

    def of_status(status):
        return [seq for seq in request.sequences if seq.status is status]

    assert [each.status for each in request.sequences] == [RequestStatus.WAITING]
    states = []
    plan = scenario.plan()
    states.append((request.sequences[0].is_prefill, request.is_finished))
    scenario.update_with_array(plan)
    scenario.update_with_array(scenario.plan())
    states.append((request.sequences[0].is_prefill, request.is_finished))
    assert len(of_status(RequestStatus.RUNNING)) == 3
    assert of_status(RequestStatus.WAITING) == []
    for number, ending in enumerate(("r#1", "r", "r#2"), start=1):
        plan = scenario.plan()
        tokens = [[9 if name == ending else 7] for name in plan.batch.req_ids]
        scenario.take(plan, ModelRunnerOutput(plan.batch.req_ids, tokens))
        ended = of_status(RequestStatus.FINISHED_STOPPED)
        assert len(ended) == number
        assert ending in {sequence.sequence_id for sequence in ended}
        assert set(request.sequences) == {*ended, *of_status(RequestStatus.RUNNING)}
        states.append((request.sequences[0].is_prefill, request.is_finished))
    assert states == [(True, False), (False, False), (False, False), (False, False), (False, True)]


# ---------------------------------------------------------------------- the plan


def test_a_plan_says_all_that_one_step_does():
    """New, resumed and known sequences with their tokens; copies; who ended and who gave way; and
    how much. Proves S095, S096, S219."""
    first, second = make_request("first", 80, max_tokens=3), make_request("second", 80)
    scenario = Scenario(first, second, preemption_mode="swap", num_host_blocks=8, **CROWD)
    plans = [scenario.step() for _ in range(4)]
    said = [
        (
            [data.req_id for data in plan.scheduled_new_reqs],
            [data.req_id for data in plan.resumed_reqs],
            [update.req_id for update in plan.block_updates],
            plan.num_scheduled_tokens,
            plan.preempted_req_ids,
            plan.finished_req_ids,
            (len(plan.copies.swap_in), len(plan.copies.swap_out), len(plan.copies.copy)),
        )
        for plan in plans
    ]
    assert said == [
        (["first", "second"], [], [], {"first": 80, "second": 80}, [], [], (0, 0, 0)),
        ([], [], ["first"], {"first": 1}, ["second"], [], (0, 5, 0)),
        ([], [], [], {"first": 1}, [], [], (0, 0, 0)),
        ([], ["second"], [], {"second": 1}, [], ["first"], (5, 0, 0)),
    ]
    for number, plan in enumerate(plans):
        assert plan.step_id == number
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values())
        assert plan.num_lookahead_slots == 0
    assert Scenario(num_lookahead_slots=2).plan().num_lookahead_slots == 2


def test_a_plan_is_numbers_and_names_and_never_the_caches_contents():
    """Block ids, pairs of ids, counts: who moves the data is the runner. Proves S170."""
    scenario = Scenario(
        make_request("first", 80),
        make_request("second", 80),
        preemption_mode="swap",
        num_host_blocks=8,
        **CROWD,
    )
    scenario.step()
    plan = scenario.step()
    assert isinstance(plan.copies, CacheCopies)
    assert plan.copies.swap_out
    for pairs in (plan.copies.swap_in, plan.copies.swap_out, plan.copies.copy):
        assert all(type(number) is int for pair in pairs for number in pair)
    for field in dataclasses.fields(plan.batch):
        column = getattr(plan.batch, field.name)
        assert isinstance(column, list) or np.issubdtype(column.dtype, np.integer)


def test_all_are_explained_as_one_by_one_running_first_or_those_of_one_tenant():
    tenants = {"a": "lab/ann", "b": None, "c": "lab", "d": "labs"}
    requests = [make_request(name, 20, tenant=tenant) for name, tenant in tenants.items()]
    scenario = Scenario(*requests, max_num_seqs=2, scheduling_policy="fcfs")
    scenario.step()
    answer = scenario.scheduler.explain_all(None)
    assert [each.request_id for each in answer.requests] == ["a", "b", "c", "d"]
    assert answer.requests == [scenario.scheduler.explain(name) for name in tenants]
    assert [each.num_requests_ahead for each in answer.requests] == [None, None, 0, 1]
    of_lab = scenario.scheduler.explain_all("lab")
    assert [each.request_id for each in of_lab.requests] == ["a", "c"]
    assert (answer.num_unfinished, of_lab.num_unfinished) == (4, 2)


def test_of_a_long_queue_the_first_are_explained_and_all_counted():
    scenario = Scenario(*(make_request(str(number), 5) for number in range(300)))
    answer = scenario.scheduler.explain_all(None)
    assert (len(answer.requests), answer.num_unfinished) == (MAX_LISTED_REQUESTS, 300)


# ---------------------------------------------------------------------- every stage can be seen


def test_every_stage_of_a_request_can_be_seen_from_outside():
    """Queue, budget, prefill, decode, swap, return, end: by what explains the request, and by the
    counters. Proves S205, S127, S186."""
    scenario = Scenario(
        make_request("first", 80, max_tokens=3),
        make_request("second", 80, max_tokens=2),
        preemption_mode="swap",
        num_host_blocks=8,
        max_num_batched_tokens=100,
        **CROWD,
    )

    def seen():
        info = scenario.scheduler.explain("second")
        assert info is not None
        counts = scenario.scheduler.statistics()
        return (
            info.status,
            info.waits_for,
            info.num_computed_tokens,
            info.num_output_tokens,
            (counts.num_running, counts.num_waiting, counts.num_swapped),
        )

    stages = [seen()]
    for _ in range(5):
        scenario.step()
        stages.append(seen())
    assert stages == [
        ("waiting", WaitReason.NOT_CONSIDERED, 0, 0, (0, 2, 0)),
        ("running", None, 20, 0, (2, 0, 0)),
        ("swapped", WaitReason.PREEMPTION, 20, 0, (1, 1, 1)),
        ("swapped", WaitReason.BLOCKS, 20, 0, (0, 1, 1)),
        ("running", None, 80, 1, (1, 0, 0)),
        ("finished", None, 81, 2, (0, 0, 0)),
    ]


def test_the_tuning_advice_is_written_down():
    """How many sequences, what prefix caching needs, what a heap costs; that it costs so little is
    proven by test_scenarios_cost.py. Proves S235."""
    path = Path(__file__).parents[3] / "docs/concepts/scheduling.md"
    tuning = path.read_text().split("## Tuning")[1].split("\n## ")[0]
    for advice in ("--max-num-seqs", "Prefix caching", "heap", "O(log n)", "O(1)"):
        assert advice in tuning
