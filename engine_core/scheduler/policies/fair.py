"""The least served tenant first: the virtual token counter of Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024."""

import bisect
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.policies.service import ServiceCounters, Tenant, TenantKey, number_of
from engine_core.scheduler.request import Request, RequestStatus

_SWAPPED, _OTHERS = 0, 1
_MOST_USERS = 1024
"""Most users counted of a tenant. The least served are forgotten first: they start at the least."""


class _Line:
    """One tenant's waiting requests: the smallest priority first, of equal ones the user with the
    least service, of that user's the oldest."""

    def __init__(self) -> None:
        self._users: dict[int, dict[str, OrderedDict[str, Request]]] = {}
        """Requests by id, by user's name, by priority."""
        self._priorities: list[int] = []
        """The priorities that have requests, ascending."""

    def __bool__(self) -> bool:
        return bool(self._priorities)

    def __iter__(self) -> Iterator[Request]:
        """All if no user were charged meanwhile; users in the order in which they began to wait."""
        for priority in self._priorities:
            for requests in self._users[priority].values():
                yield from requests.values()

    def add(self, request: Request) -> None:
        """Put the request behind those of its priority and user."""
        users = self._users.get(request.message.priority)
        if users is None:
            users = self._users[request.message.priority] = {}
            bisect.insort(self._priorities, request.message.priority)
        users.setdefault(user_of(request), OrderedDict())[request.request_id] = request

    def put_first(self, request: Request) -> None:
        """Move the request, which is in the line, before the others of its priority and user."""
        requests = self._users[request.message.priority][user_of(request)]
        requests.move_to_end(request.request_id, last=False)

    def first(self, service_by_user: Mapping[str, float]) -> Request:
        users = self._users[self._priorities[0]]
        if len(users) == 1:
            (requests,) = users.values()
        else:
            requests = users[min(users, key=lambda user: service_by_user.get(user, 0.0))]
        return next(iter(requests.values()))

    def remove(self, request: Request) -> None:
        users = self._users[request.message.priority]
        user = user_of(request)
        del users[user][request.request_id]
        if not users[user]:
            del users[user]
        if not users:
            del self._users[request.message.priority]
            self._priorities.remove(request.message.priority)


class FairQueue:
    """A line for each tenant, in two lanes: swapped requests, and all others. Selecting is one
    argmin over the tenants with requests, everything else O(1)."""

    def __init__(self, counters: ServiceCounters) -> None:
        self._counters = counters
        self._lines: tuple[dict[TenantKey, _Line], dict[TenantKey, _Line]] = ({}, {})
        self._places: dict[str, tuple[int, TenantKey]] = {}
        """Lane and tenant of each request, by id."""
        self._keys_by_number: dict[int, TenantKey] = {}
        self._served_last: Tenant | None = None
        self.service_by_user: dict[TenantKey, dict[str, float]] = {}
        """Weighted tokens of a named tenant's users, while it has unfinished requests. One that
        comes later starts with the least of the others."""
        self._head: Request | None = None
        """Stays the head while it is admitted, though that charges its tenant."""

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """All requests, the next to be popped first, as if no tenant were charged meanwhile."""
        for lane in (_SWAPPED, _OTHERS):
            keys = self._counters.keys[lane]
            for number in np.argsort(keys, kind="stable")[: len(self._lines[lane])].tolist():
                yield from self._lines[lane][self._keys_by_number[number]]

    @property
    def floor(self) -> float:
        """The counter to which a tenant that begins to wait is lifted."""
        if self._places:
            return self._counters.least_waiting
        return 0.0 if self._served_last is None else self._counters.counter(self._served_last)

    def add_request(self, request: Request) -> None:
        """Put the request behind its tenant's others of its priority and user."""
        self._join(request, is_lifted=True)

    def prepend_request(self, request: Request) -> None:
        """Put the request in front of its tenant's others of its priority and user. One that never
        ran was only skipped: its tenant never stopped waiting."""
        line = self._join(request, is_lifted=request.status is not RequestStatus.WAITING)
        line.put_first(request)

    def peek_request(self) -> Request:
        """The first request of the least served tenant."""
        if self._head is None:
            lane = _SWAPPED if self._lines[_SWAPPED] else _OTHERS
            lines = self._lines[lane]
            if len(lines) == 1:
                (key,) = lines
            else:
                key = self._keys_by_number[int(self._counters.keys[lane].argmin())]
            self._head = lines[key].first(self.service_by_user.get(key, {}))
        return self._head

    def reselect_head(self) -> None:
        """Tenants were charged: another request may be the head."""
        self._head = None

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        self._served_last = self._counters.enter(tenant_key(request))
        return request

    def remove_request(self, request: Request) -> None:
        self._head = None
        lane, key = self._places.pop(request.request_id)
        line = self._lines[lane][key]
        line.remove(request)
        if not line:
            del self._lines[lane][key]
            self._counters.stop_waiting(self._counters.enter(key), lane)

    def _join(self, request: Request, *, is_lifted: bool) -> _Line:
        assert request.request_id not in self._places
        self._head = None
        lane = _SWAPPED if request.status is RequestStatus.SWAPPED else _OTHERS
        key = tenant_key(request)
        tenant = self._counters.enter(key)
        if is_lifted and not (key in self._lines[_SWAPPED] or key in self._lines[_OTHERS]):
            self._counters.lift(tenant, self.floor)
        if request.message.tenant is not None:
            users = self.service_by_user.setdefault(key, {})
            users.setdefault(user_of(request), min(users.values(), default=0.0))
        if key not in self._lines[lane]:
            self._lines[lane][key] = _Line()
            self._keys_by_number[number_of(tenant)] = key
            self._counters.start_waiting(tenant, lane)
        line = self._lines[lane][key]
        line.add(request)
        self._places[request.request_id] = (lane, key)
        return line


class Fair(SchedulingPolicy):
    """Each tenant has a counter of the service it had: `input_weight` for each prompt token that
    was not in the cache, charged when the request is admitted, and `output_weight` for each output
    token, charged as it is decoded, both divided by the tenant's weight. What is recomputed after a
    preemption is not charged. Next is a request of the waiting tenant with the least counter: the
    most urgent, of equal ones that of the user with the least service, the oldest of that; a user
    is what stands behind a slash in the tenant's name, and is charged for output when a request
    ends. The victim is the least urgent of the most served tenant, the newest of equals. A tenant
    that begins to wait is lifted to the least counter of the waiting tenants, or, if there are
    none, to that of the tenant served last: idle time earns no credit, and service above the
    others' still counts.

    The bound. Let L be the longest prompt and M the tokens that admitted requests can have (device
    and host blocks), and w the least weight. Then

        U = max(input_weight * L, output_weight * M) / w

    is the most by which the counters of two waiting tenants differ (when last selected, a tenant
    was the least; since then it grew by one prompt and by what its admitted requests decode). Over
    any time in which two tenants both wait without a break, the service to them, divided by their
    weights, differs by at most 2 * U. This holds for output_weight >= input_weight; else the sum of
    the two terms stands for their maximum. It does not depend on how much each tenant sends, or on
    the number of tenants.

    Args:
        weights: shares of tenants by name; 1 for those not named.
        input_weight, output_weight: what a token counts for; an output token costs a step of its
            own, a prompt token shares one.
    """

    name = "fair"
    counts_service = True

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
    ) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._counters = ServiceCounters(weights or {}, output_weight)
        self.waiting: FairQueue = FairQueue(self._counters)
        self._charged: set[str] = set()
        """Unfinished requests whose prompts are charged."""
        self._leaving: dict[TenantKey, None] = {}
        """Tenants whose last request is over: the last step's output is still to be charged."""

    def check(self, request: Request) -> None:
        """Priorities order a tenant's requests."""

    def new_step(self) -> None:
        """Tenants without requests give their numbers back."""
        if not self.has_one_tenant:
            self.waiting.reselect_head()
        if self._leaving:
            for key in self._leaving:
                if self._counters.enter(key).num_unfinished == 0:
                    self._counters.leave(key, self.waiting.floor)
                    self.waiting.service_by_user.pop(key, None)
            self._leaving.clear()

    def select_victim(self, running: dict[str, Request], requester: Request) -> Request:
        counters: dict[TenantKey, float] = {}
        victim, most = requester, (-np.inf, 0)
        for request in reversed(running.values()):
            key = tenant_key(request)
            if key not in counters:
                counters[key] = self._counters.counter(self._counters.enter(key))
            if (counters[key], request.message.priority) > most:
                victim, most = request, (counters[key], request.message.priority)
        return victim

    def on_arrival(self, request: Request) -> int:
        """Its tenant's number, until the first step after the tenant's last request is over."""
        tenant = self._counters.enter(tenant_key(request))
        tenant.num_unfinished += 1
        return number_of(tenant)

    def on_finish(self, request: Request) -> None:
        self._charged.discard(request.request_id)
        num_tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
        self._charge_user(request, num_tokens * self._output_weight)
        self.waiting.reselect_head()
        tenant = self._counters.enter(tenant_key(request))
        tenant.num_unfinished -= 1
        if tenant.num_unfinished == 0:
            self._leaving[tenant_key(request)] = None

    def on_admit(self, request: Request, num_uncached_tokens: int) -> None:
        """Charge its prompt, the first time."""
        if request.request_id in self._charged:
            return
        self._charged.add(request.request_id)
        tenant = self._counters.enter(tenant_key(request))
        self._counters.charge(tenant, num_uncached_tokens * self._input_weight)
        self._charge_user(request, num_uncached_tokens * self._input_weight)

    def _charge_user(self, request: Request, num_weighted_tokens: float) -> None:
        if request.message.tenant is None:
            return
        users = self.waiting.service_by_user[tenant_key(request)]
        users[user_of(request)] = users.get(user_of(request), 0.0) + num_weighted_tokens
        if len(users) > _MOST_USERS:
            most_served = sorted(users, key=users.__getitem__)[_MOST_USERS // 2 :]
            self.waiting.service_by_user[tenant_key(request)] = {
                name: users[name] for name in most_served
            }

    def on_decode(self, num_tokens_by_tenant: npt.NDArray[np.int64]) -> None:
        """Charge one step's output."""
        self._counters.charge_output(num_tokens_by_tenant)
        self.waiting.reselect_head()

    @property
    def has_one_tenant(self) -> bool:
        return self._counters.num_present == 1

    def on_decode_alone(self, num_tokens: int) -> None:
        """Charge one step's output. The head of the queue stays: it is the oldest."""
        self._counters.charge_only_tenant(num_tokens)

    def service_by_tenant(self) -> dict[str, float]:
        """Weighted tokens, as charged, without lifts; not divided by the tenants' weights."""
        return self._counters.served_by_tenant()


def tenant_key(request: Request) -> TenantKey:
    """The tenant that is charged for the request."""
    if request.message.tenant is None:
        return request.client_index
    return request.tenant_name


def user_of(request: Request) -> str:
    """The user, within its tenant, that the request is of; empty: the tenant itself."""
    return "" if request.message.tenant is None else request.message.tenant.partition("/")[2]
