"""First come, first served."""

import pytest
from policy_requests import PolicyRequest, by_id, drain, ids

from engine_core.scheduler.policies.fcfs import FirstComeFirstServed, FirstComeFirstServedQueue
from engine_core.scheduler.request import RequestStatus


def make(*names: str, status: RequestStatus = RequestStatus.WAITING) -> list[PolicyRequest]:
    return [PolicyRequest(name, status=status) for name in names]


def test_new_requests_leave_in_the_order_in_which_they_came():
    """Proves S042, S043."""
    queue = FirstComeFirstServedQueue()
    assert not queue
    for request in make("a", "b", "c"):
        queue.add_request(request)
    assert queue.peek_request().request_id == "a"
    assert len(queue) == 3
    assert ids(queue) == drain(queue) == ["a", "b", "c"]
    assert not queue


def test_a_preempted_request_goes_to_the_head_in_front_of_those_preempted_before_it():
    """Proves S044."""
    queue = FirstComeFirstServedQueue()
    queue.add_request(*make("new"))
    for victim in make("newer", "older", status=RequestStatus.PREEMPTED):
        queue.prepend_request(victim)
    assert drain(queue) == ["older", "newer", "new"]


def test_swapped_requests_stand_in_front_of_all_others_in_their_own_order():
    queue = FirstComeFirstServedQueue()
    (swapped_new, swapped_old) = make("s-new", "s-old", status=RequestStatus.SWAPPED)
    queue.prepend_request(swapped_new)
    queue.prepend_request(*make("preempted", status=RequestStatus.PREEMPTED))
    queue.prepend_request(swapped_old)
    queue.add_request(*make("new"))
    assert ids(queue) == drain(queue) == ["s-old", "s-new", "preempted", "new"]


def test_any_request_can_be_removed_whatever_became_of_its_status():
    queue = FirstComeFirstServedQueue()
    requests = make("a", "b", "c") + make("s", status=RequestStatus.SWAPPED)
    for request in requests:
        queue.add_request(request)
    for request in (requests[1], requests[3]):
        request.status = RequestStatus.FINISHED_ABORTED
        queue.remove_request(request)
    assert drain(queue) == ["a", "c"]


def test_the_newest_running_request_gives_way_though_it_be_the_one_that_asks():
    """Proves S119, S128."""
    policy = FirstComeFirstServed()
    old, new = make("old", "new")
    assert policy.select_victim(by_id(old, new), old) is new
    assert policy.select_victim(by_id(old, new), new) is new
    assert policy.select_victim(by_id(old), old) is old


def test_no_request_is_forced_out_and_nothing_is_counted():
    policy = FirstComeFirstServed()
    running, waiting = make("running", "waiting")
    policy.waiting.add_request(waiting)
    assert policy.select_forced_victims(by_id(running)) == []
    assert policy.counts_service is False
    assert policy.service_by_tenant() == {}


def test_a_priority_is_refused_with_the_option_that_would_serve_it():
    policy = FirstComeFirstServed()
    policy.check(PolicyRequest("a"))
    with pytest.raises(ValueError, match=r"priority is -3.*fcfs.*--scheduling-policy priority"):
        policy.check(PolicyRequest("a", priority=-3))
