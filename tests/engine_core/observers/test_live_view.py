"""Snapshots for those who watch: behind steps, not too often, and nothing at all for nobody."""

import itertools
from types import SimpleNamespace

import pytest
from test_core_loop import Served, ask

from engine_core.observers.base import FinishedStep
from engine_core.observers.live_view import LiveView
from engine_core.server.access import permitted_part
from engine_core.server.clients import Client, Rights
from protocol.calls import SchedulerSnapshot, WatchScheduler
from protocol.errors import ErrorCode
from protocol.outputs import CallResult
from protocol.requests import Call
from protocol.snapshots import (
    CACHED,
    EMPTY,
    FIRST_PREFIX,
    FIRST_REQUEST,
    IN_USE,
    BlockMap,
    RequestSummary,
    SchedulerView,
    StepSummary,
)
from tests.protocol.sample_messages import SNAPSHOT

NOTHING = SchedulerView(
    steps=[], requests=[], blocks=BlockMap(blocks_per_cell=1, owners=b"", levels=b"", prefixes=[])
)


class Watched:
    """A live view before a made-up scheduler, on a clock of its own."""

    def __init__(self, view_takes_s=0.0):
        self.now_s = 100.0
        self.view_takes_s = view_takes_s
        self.answers = []
        self.num_views = 0
        self.view = LiveView(self._view)
        self.view.join(
            SimpleNamespace(statistics=lambda: SNAPSHOT.statistics, clock=lambda: self.now_s)
        )
        self.watch = self.view.handlers()[WatchScheduler]

    def _view(self, steps):
        self.num_views += 1
        self.now_s += self.view_takes_s
        made = [
            StepSummary(
                step_id=plan.step_id, token_budget=1, num_decode_tokens=1, prefill_chunks=[],
                num_preempted=0, duration_s=duration_s,
            )
            for plan, duration_s in steps
        ]  # fmt: skip
        return SchedulerView(steps=made, requests=[], blocks=NOTHING.blocks)

    def ask(self, client, after=-1):
        self.watch(
            client,
            WatchScheduler(after_step_id=after),
            lambda answer: self.answers.append((self.now_s, client, answer)),
        )

    def step(self, step_id, num_tokens=1):
        """It takes 10 ms."""
        plan = SimpleNamespace(
            step_id=step_id, total_num_scheduled_tokens=num_tokens, preempted_req_ids=[]
        )
        step = FinishedStep(plan, None, self.now_s, self.now_s, self.now_s + 0.01, True)
        self.now_s += 0.01
        self.view.on_step(step)


def client(name="c", **rights):
    return Client(0, name.encode(), name, Rights(**rights))


def step_ids(answer):
    return [step.step_id for step in answer.view.steps]


def test_whoever_asks_again_at_once_gets_ten_snapshots_a_second_with_every_step_once():
    watched, page = Watched(), client()
    watched.ask(page)
    seen = []
    for number in range(200):
        watched.step(number)
        if len(watched.answers) > len(seen):
            seen.append(step_ids(watched.answers[-1][2]))
            watched.ask(page, after=number)
    assert len(seen) == 20
    assert [step_id for each in seen for step_id in each] == list(range(191))
    times = [at_s for at_s, _, _ in watched.answers]
    assert all(later - at_s >= 0.0999 for at_s, later in itertools.pairwise(times))


def test_steps_are_noted_only_while_a_client_watches():
    watched, page = Watched(), client()
    watched.step(0)
    watched.ask(page)
    for number in range(1, 250):
        watched.step(number)
    assert len(watched.answers) == watched.num_views == 1
    watched.ask(page)
    watched.step(900)
    assert step_ids(watched.answers[-1][2]) == [900]


def test_a_snapshot_that_is_slow_to_make_is_made_less_often():
    """Below 1 % of the time, whatever the size of the pool or the speed of the machine."""
    watched, page = Watched(view_takes_s=0.02), client()
    started_s = watched.now_s
    for number in range(2000):
        if not watched.answers or watched.answers[-1][0] != watched.now_s:
            watched.ask(page, number)
        watched.step(number)
    assert 5 < watched.num_views < (watched.now_s - started_s) * 0.01 / 0.02


def test_all_who_watch_share_a_snapshot_and_get_their_own_steps():
    watched, one, other = Watched(), client("one"), client("other")
    watched.ask(one, after=1)
    watched.ask(other, after=-1)
    watched.view._due_s = watched.now_s + 0.025
    for number in range(3):
        watched.step(number)
    assert [(each, step_ids(answer)) for _, each, answer in watched.answers] == [
        (one, [2]),
        (other, [0, 1, 2]),
    ]
    assert watched.num_views == 1


def test_a_second_call_of_a_client_takes_the_place_of_the_first():
    watched, page = Watched(), client()
    watched.ask(page)
    watched.ask(page)
    watched.step(0)
    failed, answered = (answer for _, _, answer in watched.answers)
    assert failed.code is ErrorCode.INVALID_REQUEST
    assert isinstance(answered, SchedulerSnapshot)


def test_a_client_that_left_is_not_answered():
    watched, page = Watched(), client()
    watched.ask(page)
    watched.view.on_departure(page)
    watched.step(0)
    assert watched.answers == []


@pytest.mark.parametrize("depth", [1, 2])
def test_the_loop_answers_behind_a_step_and_its_requests_get_the_same_tokens(depth):
    answers = []
    asked = [ask("a", 20, 5), ask("b", 9, 6)]
    served = Served(depth, asked, [Call(call_id=3, call=WatchScheduler())], runs=False)
    served.sent.post = lambda client, message, frames=(): answers.append(message)
    served.core.run()
    assert served.sent.tokens == Served(depth, asked).sent.tokens
    (answer,) = answers
    assert isinstance(answer.result, SchedulerSnapshot)
    assert answer.call_id == 3
    assert [request.request_id for request in answer.result.view.requests] == ["a", "b"]
    assert answer.result.statistics.num_running == 2


# ---------------------------------------------------------------- whose requests


def request(name, tenant=None):
    return RequestSummary(
        number=ord(name), request_id=name, tenant=tenant, status="running", num_sequences=1,
        num_prompt_tokens=1, num_cached_tokens=None, num_computed_tokens=1, num_output_tokens=0,
        max_tokens=1, num_preemptions=0, num_blocks=1,
    )  # fmt: skip


def owners(*values):
    return b"".join(value.to_bytes(2, "little") for value in values)


def test_a_key_sees_what_other_clients_with_it_have_sent_and_its_users_and_nobody_elses():
    tenants = {"a": "team", "b": "team/ann", "c": "team2", "d": "tea", "e": None}
    view = SchedulerView(
        steps=[],
        requests=[request(name, tenant) for name, tenant in tenants.items()],
        blocks=BlockMap(blocks_per_cell=1, owners=b"", levels=b"", prefixes=[]),
    )
    result = SchedulerSnapshot(statistics=SNAPSHOT.statistics, view=view)
    call = Call(call_id=1, call=WatchScheduler())
    mine = client(key_name="team", is_admin=False)
    seen = permitted_part(mine, call, CallResult(call_id=1, result=result)).result
    assert [each.request_id for each in seen.view.requests] == ["a", "b"]


def test_without_an_admins_key_a_client_sees_its_own_requests_and_that_there_are_others():
    step = StepSummary(
        step_id=1, token_budget=64, num_decode_tokens=2,
        prefill_chunks=[(ord("a"), 5), (ord("b"), 6), (ord("c"), 7)],
        num_preempted=0, duration_s=0.1,
    )  # fmt: skip
    first = FIRST_REQUEST
    cells = owners(EMPTY, CACHED, IN_USE, first, first + 1, first + 2, FIRST_PREFIX)
    view = SchedulerView(
        steps=[step],
        requests=[request("a"), request("b"), request("c")],
        blocks=BlockMap(blocks_per_cell=1, owners=cells, levels=b"\1" * 7, prefixes=[(2, 1)]),
    )
    result = SchedulerSnapshot(statistics=SNAPSHOT.statistics, view=view)
    mine = client(key_name="team", is_admin=False)
    mine.request_ids.add("b")
    call = Call(call_id=1, call=WatchScheduler())
    seen = permitted_part(mine, call, CallResult(call_id=1, result=result)).result
    assert [each.request_id for each in seen.view.requests] == ["b"]
    assert seen.view.steps[0].prefill_chunks == [(ord("b"), 6), (0, 12)]
    assert seen.view.blocks.owners == owners(EMPTY, CACHED, IN_USE, IN_USE, first, IN_USE, IN_USE)
    assert seen.view.blocks.prefixes == []
    assert seen.statistics.service_by_tenant == {"team": 12.5}
    stranger = permitted_part(client(is_admin=False), call, CallResult(call_id=1, result=result))
    assert stranger.result.view.requests == []
    assert stranger.result.statistics.service_by_tenant == {}
    admin = permitted_part(client(), call, CallResult(call_id=1, result=result))
    assert admin.result is result
