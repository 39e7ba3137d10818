"""Ageing: nothing starves, and no two requests force each other out."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_requests import PolicyRequest, by_id

from engine_core.scheduler.policies.priority import Priority, PriorityQueue
from engine_core.scheduler.request import RequestStatus
from tests.profiles import examples


def steps_until_served(ageing_s: float | None, *, limit: int) -> int | None:
    """One slot, a step a second, each request one step; a more urgent one arrives every step."""
    policy = Priority(ageing_s=ageing_s)
    lax = PolicyRequest("lax", priority=10, arrival_time=0.0)
    policy.waiting.add_request(lax)
    for step in range(limit):
        policy.new_step()
        policy.waiting.add_request(PolicyRequest(f"u{step}", priority=0, arrival_time=float(step)))
        if policy.waiting.pop_request() is lax:
            return step
    return None


def test_without_ageing_an_endless_stream_of_urgent_requests_starves_the_others():
    """Proves S105: what is documented is so."""
    assert steps_until_served(None, limit=5_000) is None


def test_with_ageing_nothing_starves():
    """Proves S105: served after (10 - 0) * ageing_s seconds, when those that arrive no longer
    outrank it."""
    assert steps_until_served(3.0, limit=5_000) == 30
    assert steps_until_served(100.0, limit=5_000) == 1_000


def test_with_ageing_nothing_starves_behind_urgent_requests_that_never_end():
    """The aged one forces out those that arrived min_gain * ageing_s after they were equal."""
    policy = Priority(ageing_s=2.0)
    running = PolicyRequest("runs for ever", priority=0, arrival_time=30.0)
    policy.waiting.add_request(PolicyRequest("lax", priority=10, arrival_time=8.5))
    assert policy.select_forced_victims(by_id(running)) == []
    policy.waiting.add_request(PolicyRequest("older", priority=10, arrival_time=7.5))
    assert policy.select_forced_victims(by_id(running)) == [running]


@given(
    ageing_s=st.floats(0.01, 1e4),
    waiting=st.lists(
        st.tuples(st.integers(-5, 5), st.integers(0, 10**5)), min_size=2, max_size=8, unique=True
    ),
    now=st.integers(10**5, 10**6),
)
def test_the_order_is_that_of_effective_priorities_at_any_time(ageing_s, waiting, now):
    queue = PriorityQueue(ageing_s)
    for number, (priority, arrival) in enumerate(waiting):
        queue.add_request(PolicyRequest(f"r{number}", priority, float(arrival)))
    effective = [
        request.priority - (now - request.arrival_time) / ageing_s for request in list(queue)
    ]
    for before, after in itertools.pairwise(effective):
        assert before <= after + 1e-6 * max(1.0, abs(after))


@settings(max_examples=examples(2) * settings().max_examples, deadline=None)
@given(
    ageing_s=st.sampled_from([None, 0.25, 5.0]),
    min_gain=st.sampled_from([0.5, 1, 3]),
    num_slots=st.integers(1, 3),
    requests=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 30)), min_size=1, max_size=8),
)
def test_requests_never_force_each_other_out_in_turn(ageing_s, min_gain, num_slots, requests):
    """Slots full of requests that never end, for a long time: each pair at most once, so at most
    n (n - 1) / 2 times in all, and then never again."""
    policy = Priority(min_gain=min_gain, ageing_s=ageing_s)
    running: dict[str, PolicyRequest] = {}
    forced: set[tuple[str, str]] = set()
    arrivals = sorted(
        (PolicyRequest(f"r{i}", p, float(t)) for i, (p, t) in enumerate(requests)),
        key=lambda request: request.arrival_time,
    )
    for step in range(200):
        policy.new_step()
        while arrivals and arrivals[0].arrival_time <= step:
            policy.waiting.add_request(arrivals.pop(0))
        if len(running) == num_slots and (victims := policy.select_forced_victims(running)):
            head, victim = policy.waiting.peek_request(), victims[0]
            assert (victim.request_id, head.request_id) not in forced
            assert (head.request_id, victim.request_id) not in forced
            forced.add((head.request_id, victim.request_id))
            del running[victim.request_id]
            victim.status = RequestStatus.PREEMPTED
            policy.waiting.prepend_request(victim)
            assert policy.waiting.peek_request() is head
        while len(running) < num_slots and policy.waiting:
            request = policy.waiting.pop_request()
            request.status = RequestStatus.RUNNING
            running[request.request_id] = request
