"""The stated bound of policy fair, in a small model of the scheduler's loop: requests reserve the
tokens that they may hold, and a pool of M tokens admits as many as fit."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_requests import PolicyRequest

from engine_core.scheduler.policies.fair import Fair
from engine_core.scheduler.policies.fcfs import FirstComeFirstServed
from engine_core.scheduler.request import RequestStatus


class Loop:
    """Counts the service by itself, and after every change checks it for each two tenants over the
    time in which both have been waiting without a break."""

    def __init__(self, policy: Fair, weights, pool: int, longest_prompt: int, input_weight=1.0):
        self.policy, self.weights, self.pool = policy, weights, pool
        self.input_weight, self.output_weight = input_weight, 2.0
        most = max(input_weight * longest_prompt, self.output_weight * pool)
        self.bound = 2 * most / min(weights.values())
        self.running: dict[str, PolicyRequest] = {}
        self.left_to_decode: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.service = dict.fromkeys(weights, 0.0)
        self.num_waiting = dict.fromkeys(weights, 0)
        self.extremes: dict[tuple[str, str], tuple[float, float]] = {}
        self.worst = 0.0

    def arrive(self, name: str, tenant: str, num_prompt: int, num_output: int) -> None:
        request = PolicyRequest(name, tenant=tenant, num_prompt_tokens=num_prompt)
        request.size = num_prompt + num_output
        self.left_to_decode[name] = num_output
        self.numbers[tenant] = self.policy.on_arrival(request)
        self.policy.waiting.add_request(request)
        self.num_waiting[tenant] += 1
        self._check()

    def step(self) -> None:
        waiting = self.policy.waiting
        self.policy.new_step()
        while waiting:
            held = sum(request.size for request in self.running.values())
            if held + waiting.peek_request().size > self.pool:
                break
            request = waiting.peek_request()
            if request.status is RequestStatus.WAITING:
                self.policy.on_admit(request, request.num_prompt_tokens)
            assert waiting.pop_request() is request
            self.num_waiting[request.tenant] -= 1
            if request.status is RequestStatus.WAITING:
                self.service[request.tenant] += self.input_weight * request.num_prompt_tokens
            request.status = RequestStatus.RUNNING
            self.running[request.request_id] = request
            self._check()
        if not self.running:
            return
        decoded = np.zeros(max(self.numbers.values()) + 1, dtype=np.int64)
        for request in list(self.running.values()):
            decoded[self.numbers[request.tenant]] += 1
            self.service[request.tenant] += self.output_weight
            self.left_to_decode[request.request_id] -= 1
        self.policy.on_decode(decoded)
        for request in list(self.running.values()):
            if not self.left_to_decode[request.request_id]:
                del self.running[request.request_id]
                self.policy.on_finish(request)
        self._check()

    def preempt(self) -> None:
        if self.running:
            victim = self.policy.select_victim(self.running, next(iter(self.running.values())))
            del self.running[victim.request_id]
            victim.status = RequestStatus.PREEMPTED
            self.policy.waiting.prepend_request(victim)
            self.num_waiting[victim.tenant] += 1
            self._check()

    def _check(self) -> None:
        for pair in itertools.combinations(self.weights, 2):
            if not all(self.num_waiting[tenant] for tenant in pair):
                self.extremes.pop(pair, None)
                continue
            first, second = (self.service[t] / self.weights[t] for t in pair)
            least, most = self.extremes.get(pair, (np.inf, -np.inf))
            least, most = min(least, first - second), max(most, first - second)
            self.extremes[pair] = (least, most)
            self.worst = max(self.worst, most - least)
            assert most - least <= self.bound + 1e-6, (pair, most - least, self.bound)


@settings(deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=4),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(0, 3), st.integers(1, 12), st.integers(1, 12)),
            st.tuples(st.just("step"), st.integers(1, 8)),
            st.tuples(st.just("preempt")),
        ),
        max_size=80,
    ),
    pool=st.integers(24, 60),
)
def test_service_of_two_waiting_tenants_differs_by_no_more_than_the_bound(weights, events, pool):
    names = [f"t{i}" for i in range(len(weights))]
    shares = dict(zip(names, weights, strict=True))
    loop = Loop(Fair(shares), shares, pool, longest_prompt=12)
    for number, event in enumerate(events):
        match event:
            case ("arrive", tenant, num_prompt, num_output):
                loop.arrive(f"r{number}", names[tenant % len(names)], num_prompt, num_output)
            case ("step", times):
                for _ in range(times):
                    loop.step()
            case _:
                loop.preempt()
    for _ in range(2_000):
        if not loop.policy.waiting and not loop.running:
            break
        loop.step()
    assert not loop.policy.waiting, "every request is served"
    assert loop.policy.service_by_tenant() == {}


def served_with_a_flood(policy) -> tuple[dict[str, float], Loop]:
    """One client sends 400 requests at once, nine keep three each waiting or running."""
    rng = np.random.default_rng(5)
    tenants = ["flood", *(f"polite {i}" for i in range(9))]
    loop = Loop(policy, dict.fromkeys(tenants, 1.0), pool=600, longest_prompt=60)
    if not isinstance(policy, Fair):
        loop.bound = np.inf
    numbers = itertools.count()
    for _ in range(400):
        loop.arrive(f"r{next(numbers)}", "flood", *rng.integers(1, 61, 2).tolist())
    for _ in range(900):
        running = [request.tenant for request in loop.running.values()]
        for tenant in tenants[1:]:
            for _ in range(3 - running.count(tenant) - loop.num_waiting[tenant]):
                loop.arrive(f"r{next(numbers)}", tenant, *rng.integers(1, 61, 2).tolist())
        loop.step()
    return loop.service, loop


def test_one_client_floods_and_nine_ask_politely_and_all_are_served_alike():
    """U = 2 * 600 tokens; the difference stays below 2 U = 2,400 however long it goes on, in fact
    far below, while each had more than ten times as much."""
    service, loop = served_with_a_flood(Fair())
    assert loop.num_waiting["flood"] > 0, "the flood never ended"
    assert loop.worst <= loop.bound == 2_400.0
    assert max(service.values()) - min(service.values()) <= loop.bound
    assert max(service.values()) < 1.15 * min(service.values())


def test_first_come_first_served_would_have_served_the_flood_alone():
    """So that the test above is known to test something."""
    service, _ = served_with_a_flood(FirstComeFirstServed())
    assert service["flood"] > 20 * max(service[f"polite {i}"] for i in range(9))
