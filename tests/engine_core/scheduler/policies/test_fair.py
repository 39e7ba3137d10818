"""Order, counters and victims of policy fair, one rule each; the bound is in test_fair_bound."""

from types import SimpleNamespace

import numpy as np
from policy_requests import PolicyRequest, by_id, drain, ids

from engine_core.scheduler.policies.fair import Fair
from engine_core.scheduler.policies.service import ServiceCounters
from engine_core.scheduler.request import RequestStatus


def join(policy: Fair, name: str, tenant: str | None, client_index: int = 0) -> PolicyRequest:
    request = PolicyRequest(name, tenant=tenant, client_index=client_index)
    request.number = policy.on_arrival(request)
    policy.waiting.add_request(request)
    return request


def serve(policy: Fair, num_prompt_tokens: int = 0) -> PolicyRequest:
    request = policy.waiting.pop_request()
    policy.on_admit(request, num_prompt_tokens)
    request.status = RequestStatus.RUNNING
    return request


def decode(policy: Fair, request: PolicyRequest, num_tokens: int) -> None:
    by_tenant = np.zeros(request.number + 1, dtype=np.int64)
    by_tenant[request.number] = num_tokens
    policy.on_decode(by_tenant)


def test_the_least_served_tenant_is_next_and_within_a_tenant_the_oldest():
    policy = Fair()
    for name in ("a1", "a2", "a3"):
        join(policy, name, "a")
    for name in ("b1", "b2"):
        join(policy, name, "b")
    served = [serve(policy, 10).request_id for _ in range(5)]
    assert served == ["a1", "b1", "a2", "b2", "a3"]


def test_prompt_tokens_and_output_tokens_are_charged_by_their_weights():
    policy = Fair(input_weight=1.0, output_weight=2.0)
    for name, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
        join(policy, name, tenant)
    first, second = serve(policy, 7), serve(policy, 0)
    decode(policy, first, 3)
    decode(policy, second, 5)
    assert policy.service_by_tenant() == {"a": 13.0, "b": 10.0}
    assert drain(policy.waiting) == ["b2", "a2"]


def test_a_tenant_of_twice_the_weight_is_served_twice_as_much():
    policy = Fair({"paid": 2.0})
    for number in range(30):
        join(policy, f"p{number}", "paid"), join(policy, f"f{number}", "free")
    served = [serve(policy, 10).tenant for _ in range(30)]
    assert (served.count("paid"), served.count("free")) == (20, 10)


def test_without_a_tenant_the_client_is_one_and_no_name_can_pose_as_it():
    policy = Fair()
    join(policy, "a", None, client_index=7)
    join(policy, "named", "client 7")
    join(policy, "other client", None, client_index=8)
    serve(policy, 100)
    join(policy, "same client", None, client_index=7)
    assert drain(policy.waiting) == ["named", "other client", "same client"]


def test_who_comes_back_from_idling_has_saved_up_no_credit():
    policy = Fair()
    join(policy, "idle1", "idle")
    policy.on_finish(serve(policy, 1))
    for number in range(40):
        join(policy, f"busy{number}", "busy")
    for _ in range(20):
        policy.on_finish(serve(policy, 100))
    for number in range(5):
        join(policy, f"back{number}", "idle")
    served = [serve(policy, 100).tenant for _ in range(10)]
    assert served.count("idle") == 5
    assert served[:4] in (["busy", "idle"] * 2, ["idle", "busy"] * 2)


def test_with_an_empty_queue_a_newcomer_is_lifted_to_the_tenant_served_last():
    policy = Fair()
    join(policy, "old", "old")
    serve(policy, 50)
    join(policy, "new", "new")
    serve(policy, 10)
    assert policy.waiting.floor == 60.0
    join(policy, "third", "third"), join(policy, "new2", "new"), join(policy, "old2", "old")
    assert policy.waiting.floor == 60.0
    assert serve(policy, 1).tenant == "old", "all are level: the first number"
    assert policy.service_by_tenant() == {"old": 51.0, "new": 10.0, "third": 0.0}


def test_a_debt_is_remembered_while_its_tenant_is_away():
    policy = Fair()
    join(policy, "heavy1", "heavy"), join(policy, "light1", "light")
    heavy, light = serve(policy, 1_000), serve(policy, 10)
    join(policy, "light2", "light")
    policy.on_finish(heavy), policy.on_finish(light)
    policy.new_step()
    join(policy, "heavy2", "heavy"), join(policy, "light3", "light")
    assert drain(policy.waiting) == ["light2", "light3", "heavy2"]


def test_a_preempted_request_goes_in_front_of_its_tenant_and_is_not_charged_again():
    policy = Fair()
    join(policy, "a1", "a"), join(policy, "a2", "a")
    victim = serve(policy, 30)
    victim.status = RequestStatus.PREEMPTED
    policy.waiting.prepend_request(victim)
    assert ids(policy.waiting) == ["a1", "a2"]
    assert serve(policy, 35) is victim
    assert policy.service_by_tenant() == {"a": 30.0}


def test_swapped_requests_stand_in_front_of_less_served_tenants():
    policy = Fair()
    join(policy, "heavy", "heavy"), join(policy, "light", "light")
    swapped = serve(policy, 500)
    join(policy, "heavy2", "heavy")
    swapped.status = RequestStatus.SWAPPED
    policy.waiting.prepend_request(swapped)
    assert ids(policy.waiting) == drain(policy.waiting) == ["heavy", "light", "heavy2"]


def test_the_victim_is_the_newest_request_of_the_most_served_tenant():
    policy = Fair()
    for name, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
        join(policy, name, tenant)
    a1, b1, b2, a2 = (serve(policy, n) for n in (100, 10, 10, 10))
    running = by_id(a1, b1, a2, b2)
    assert [request.tenant for request in running.values()] == ["a", "b", "a", "b"]
    assert policy.select_victim(running, b1) is a2
    assert policy.select_victim(by_id(b1), b1) is b1
    assert policy.select_forced_victims(running) == []


def test_the_request_that_is_shown_is_the_one_taken_though_it_was_charged_meanwhile():
    policy = Fair()
    shown, other = join(policy, "a", "a"), join(policy, "b", "b")
    assert policy.waiting.peek_request() is shown
    policy.on_admit(shown, 100)
    assert policy.waiting.pop_request() is shown
    assert policy.waiting.pop_request() is other


def test_the_next_is_chosen_again_when_a_step_has_served_somebody():
    policy = Fair()
    first, second = join(policy, "a", "a"), join(policy, "b", "b")
    assert policy.waiting.peek_request() is first
    decode(policy, first, 3)
    assert policy.waiting.peek_request() is second


def test_a_request_that_was_passed_over_loses_nothing():
    policy = Fair()
    for name, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
        join(policy, name, tenant)
    serve(policy, 100), serve(policy, 5)
    passed_over = policy.waiting.pop_request()
    policy.waiting.prepend_request(passed_over)
    join(policy, "b3", "b")
    served = [(serve(policy, 30).request_id) for _ in range(3)]
    assert passed_over.request_id == "b2"
    assert served == ["b2", "b3", "a2"]


def test_the_last_output_of_a_tenant_that_goes_is_charged_to_it():
    policy = Fair()
    going = join(policy, "one token", "going")
    join(policy, "other", "other")
    serve(policy, 10)
    policy.on_finish(going)
    decode(policy, going, 1)
    assert policy.service_by_tenant() == {"other": 0.0}
    policy.new_step()
    join(policy, "again", "going")
    assert policy.service_by_tenant() == {"other": 0.0, "going": 12.0}


def test_numbers_are_used_again_and_counters_do_not_pass_over_with_them():
    policy = Fair()
    keep = join(policy, "keep", "keep")
    gone = join(policy, "gone", "gone")
    serve(policy, 1), serve(policy, 5)
    policy.on_finish(gone)
    policy.new_step()
    fresh = join(policy, "fresh", "fresh")
    assert fresh.number == gone.number != keep.number
    assert policy.service_by_tenant() == {"keep": 1.0, "fresh": 0.0}
    decode(policy, fresh, 1)
    assert policy.service_by_tenant() == {"keep": 1.0, "fresh": 2.0}


def test_an_aborted_request_leaves_nothing_behind():
    policy = Fair()
    requests = [join(policy, f"r{i}", f"t{i % 3}") for i in range(9)]
    for request in requests[::2] + requests[1::2]:
        policy.waiting.remove_request(request)
        policy.on_finish(request)
    assert not policy.waiting
    policy.new_step()
    assert list(policy.waiting) == []
    assert policy.service_by_tenant() == {}


def test_more_tenants_than_the_first_columns_hold():
    policy = Fair()
    requests = [join(policy, f"r{i}", f"t{i}") for i in range(1_000)]
    assert sorted(request.number for request in requests) == list(range(1_000))
    decode(policy, requests[0], 50)
    assert drain(policy.waiting) == [f"r{i}" for i in range(1, 1_000)] + ["r0"]


def test_tenants_that_went_are_not_remembered_for_ever():
    counters = ServiceCounters({}, output_weight=2.0)
    for number in range(20_000):
        tenant = counters.enter(f"t{number}")
        counters.charge(tenant, float(number))
        counters.leave(f"t{number}", floor=0.0)
    assert len(counters.departed) <= 4_096
    assert counters.counter(counters.enter("t19999")) == 19_999.0


def test_a_priority_orders_a_tenants_requests_and_no_others():
    policy = Fair()
    for name, tenant, priority in (("a1", "a", 0), ("a2", "a", -5), ("b1", "b", 9), ("a3", "a", 0)):
        request = PolicyRequest(name, tenant=tenant, priority=priority)
        policy.check(request)
        request.number = policy.on_arrival(request)
        policy.waiting.add_request(request)
    assert [serve(policy, 10).request_id for _ in range(4)] == ["a2", "b1", "a1", "a3"]


def test_what_comes_back_is_first_of_its_priority_only():
    policy = Fair()
    for name, priority in (("urgent", -1), ("old", 0)):
        policy.waiting.add_request(PolicyRequest(name, tenant="a", priority=priority))
    again = PolicyRequest("again", tenant="a", status=RequestStatus.PREEMPTED)
    policy.waiting.prepend_request(again)
    assert ids(policy.waiting) == ["urgent", "again", "old"]
    assert drain(policy.waiting) == ["urgent", "again", "old"]


def test_users_divide_their_tenants_share_and_add_nothing_to_it():
    policy = Fair()
    for number in range(8):
        for user in ("x", "y", "z"):
            join(policy, f"a/{user}{number}", f"a/{user}")
        join(policy, f"b{number}", "b")
    served = [serve(policy, 10).tenant for _ in range(16)]
    assert served.count("b") == 8
    users = [tenant for tenant in served if tenant != "b"]
    assert sorted(users.count(f"a/{user}") for user in "xyz") == [2, 3, 3]
    assert policy.service_by_tenant() == {"a": 80.0, "b": 80.0}


def test_a_users_output_is_charged_when_its_request_ends():
    policy = Fair(output_weight=2.0)
    for user in ("x", "y"):
        join(policy, f"{user}1", f"a/{user}"), join(policy, f"{user}2", f"a/{user}")
    first = serve(policy, 1)
    first.sequences = (SimpleNamespace(num_output_tokens=20), SimpleNamespace(num_output_tokens=4))
    policy.on_finish(first)
    assert first.request_id == "x1"
    assert [serve(policy, 10).request_id for _ in range(3)] == ["y1", "y2", "x2"]


def test_a_user_that_comes_later_starts_with_the_least_of_the_others():
    policy = Fair()
    for number in range(4):
        join(policy, f"x{number}", "a/x")
    serve(policy, 50)
    join(policy, "y0", "a/y"), join(policy, "y1", "a/y")
    assert [serve(policy, 50).request_id for _ in range(4)] == ["x1", "y0", "x2", "y1"]


def test_a_tenant_of_endless_users_costs_bounded_memory():
    policy = Fair()
    join(policy, "stays", "a")
    for number in range(5000):
        join(policy, f"r{number}", f"a/{number}")
        policy.on_finish(serve(policy, 10))
    assert policy.waiting.service_by_user.keys() == {"a"}
    assert len(policy.waiting.service_by_user["a"]) <= 1024
    policy.on_finish(serve(policy))
    policy.new_step()
    assert policy.waiting.service_by_user == {}


def test_the_victim_is_the_least_urgent_of_the_most_served_tenant():
    policy = Fair()
    running = []
    for name, tenant, priority in (("a1", "a", 5), ("a2", "a", 0), ("b1", "b", 9)):
        request = PolicyRequest(name, tenant=tenant, priority=priority)
        request.number = policy.on_arrival(request)
        policy.waiting.add_request(request)
    while len(policy.waiting):
        running.append(serve(policy, 10))
    assert policy.select_victim(by_id(*running), running[-1]).request_id == "a1"
