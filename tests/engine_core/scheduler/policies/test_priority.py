"""Order, victims and forced preemption by priority."""

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_requests import PolicyRequest, by_id, drain, ids

from engine_core.scheduler.policies.priority import Priority, PriorityQueue
from engine_core.scheduler.request import RequestStatus


def test_the_order_is_priority_then_arrival_then_joining():
    """Proves S042, S043, S078."""
    queue = PriorityQueue()
    queue.add_request(PolicyRequest("late-urgent", priority=-1, arrival_time=9.0))
    queue.add_request(PolicyRequest("new", arrival_time=2.0))
    queue.add_request(PolicyRequest("equal-first", arrival_time=1.0))
    queue.add_request(PolicyRequest("equal-second", arrival_time=1.0))
    queue.add_request(PolicyRequest("lax", priority=5))
    expected = ["late-urgent", "equal-first", "equal-second", "new", "lax"]
    assert queue.peek_request().request_id == "late-urgent"
    assert ids(queue) == drain(queue) == expected


def test_a_preempted_request_goes_to_the_place_of_its_rank_in_front_of_its_equals():
    """Proves S044."""
    queue = PriorityQueue()
    queue.add_request(PolicyRequest("urgent", priority=-1, arrival_time=7.0))
    queue.add_request(PolicyRequest("equal", arrival_time=1.0))
    for name in ("newer", "older"):
        victim = PolicyRequest(name, arrival_time=1.0, status=RequestStatus.PREEMPTED)
        queue.prepend_request(victim)
    assert drain(queue) == ["urgent", "older", "newer", "equal"]


@settings(deadline=None)
@given(
    ageing_s=st.sampled_from([None, 0.5, 10.0]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "prepend", "swap", "pop", "remove"]),
            st.integers(-2, 2),
            st.integers(0, 20),
        ),
        max_size=60,
    ),
)
def test_the_heap_agrees_with_a_sorted_list(ageing_s, steps):
    queue, model = PriorityQueue(ageing_s), []
    for number, (action, priority, time) in enumerate(steps, start=1):
        if action in ("add", "prepend", "swap"):
            status = RequestStatus.SWAPPED if action == "swap" else RequestStatus.WAITING
            request = PolicyRequest(f"r{number}", priority, float(time), status=status)
            (queue.add_request if action == "add" else queue.prepend_request)(request)
            now = 1_000.0
            effective = priority - (0.0 if ageing_s is None else (now - time) / ageing_s)
            order = number if action == "add" else -number
            model.append(((action != "swap", effective, float(time), order), request))
            model.sort(key=lambda entry: entry[0])
        elif model and action == "pop":
            assert queue.pop_request() is model.pop(0)[1]
        elif model:
            queue.remove_request(model.pop(time % len(model))[1])
        assert len(queue) == len(model)
        assert bool(queue) == bool(model)
        assert not model or queue.peek_request() is model[0][1]
    assert ids(queue) == [request.request_id for _, request in model]


def test_removed_requests_do_not_pile_up_in_the_heap():
    queue = PriorityQueue()
    queue.add_request(PolicyRequest("first", priority=-1))
    for number in range(5_000):
        request = PolicyRequest(f"r{number}")
        queue.add_request(request)
        queue.remove_request(request)
    assert len(queue._heap) < 200
    assert drain(queue) == ["first"]


def test_a_request_that_left_may_come_back_under_the_same_id():
    queue = PriorityQueue()
    gone, again = PolicyRequest("a", priority=-5), PolicyRequest("a", priority=5)
    queue.add_request(gone)
    queue.remove_request(gone)
    queue.add_request(again)
    queue.add_request(PolicyRequest("b"))
    assert drain(queue) == ["b", "a"]


def test_the_victim_is_the_largest_priority_then_arrival_of_all_running():
    """Proves S120."""
    policy = Priority()
    urgent = PolicyRequest("urgent", priority=0, arrival_time=9.0)
    lax_old = PolicyRequest("lax-old", priority=2, arrival_time=1.0)
    lax_new = PolicyRequest("lax-new", priority=2, arrival_time=3.0)
    running = by_id(lax_new, lax_old, urgent)
    assert policy.select_victim(running, urgent) is lax_new
    assert policy.select_victim(running, lax_old) is lax_new
    assert policy.select_victim(by_id(urgent), urgent) is urgent


def test_of_equal_victims_the_newest_goes():
    policy = Priority()
    first, second = PolicyRequest("first"), PolicyRequest("second")
    assert policy.select_victim(by_id(first, second), first) is second


def running_by_priority(policy: Priority, **priorities: int) -> dict[str, PolicyRequest]:
    running = by_id(*(PolicyRequest(name, priority=p) for name, p in priorities.items()))
    for request in running.values():
        policy.waiting.add_request(request)
    drain(policy.waiting)
    return running


def test_a_head_may_force_out_all_that_it_outranks_the_worst_first():
    """Proves S080."""
    policy = Priority()
    running = running_by_priority(policy, a=1, b=3, c=0, d=3)
    policy.waiting.add_request(PolicyRequest("head", priority=0, arrival_time=50.0))
    assert ids(policy.select_forced_victims(running)) == ["d", "b", "a"]


def test_equals_swapped_heads_and_switched_off_policies_force_no_request_out():
    policy = Priority()
    running = running_by_priority(policy, a=1)
    assert policy.select_forced_victims(running) == []
    policy.waiting.add_request(PolicyRequest("equal", priority=1, arrival_time=-9.0))
    assert policy.select_forced_victims(running) == []
    swapped = PolicyRequest("swapped", priority=-5, status=RequestStatus.SWAPPED)
    policy.waiting.prepend_request(swapped)
    assert policy.select_forced_victims(running) == []
    off = Priority(force_preemption=False)
    off.waiting.add_request(PolicyRequest("head", priority=-5))
    assert off.select_forced_victims(running) == []


def test_a_step_in_which_no_request_can_be_outranked_does_not_search():
    policy = Priority()
    running = running_by_priority(policy, **{f"r{i}": 1 for i in range(10)})
    policy.waiting.add_request(PolicyRequest("head", priority=1))
    assert policy.select_forced_victims(running) == []

    class Unsearchable(dict):
        def values(self):
            raise AssertionError("searched")

    assert policy.select_forced_victims(Unsearchable(running)) == []
    worse = PolicyRequest("worse", priority=7)
    policy.waiting.prepend_request(worse)
    head = policy.waiting.pop_request()
    assert policy.waiting.pop_request() is worse
    policy.waiting.prepend_request(head)
    assert policy.select_forced_victims({**running, "worse": worse}) == [worse]
