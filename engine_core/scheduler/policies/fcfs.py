"""First come, first served. Knows requests by id and status, and nothing of urgency or tenants."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Reversible

from engine_core.scheduler.policies.uncounted import NoServiceAccounting
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_status import RequestStatus


class FirstComeFirstServedQueue:
    """New requests join at the tail, preempted ones at the head, swapped ones in front of all that
    are not. Every operation is O(1): OrderedDicts rather than deques, so that an abort need not
    search. Where a request stands is decided when it joins; one whose status changes meanwhile is
    still found."""

    def __init__(self) -> None:
        self._swapped: OrderedDict[str, Request] = OrderedDict()
        self._others: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._swapped) + len(self._others)

    def __iter__(self) -> Iterator[Request]:
        yield from self._swapped.values()
        yield from self._others.values()

    @property
    def is_empty(self) -> bool:
        return not self._others and not self._swapped

    def add_request(self, request: Request) -> None:
        """To the tail."""
        assert request.request_id not in self._swapped
        assert request.request_id not in self._others
        self._lane(request)[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """To the head."""
        self.add_request(request)
        self._lane(request).move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        """The head, which stays. The queue is not empty."""
        return next(iter((self._swapped or self._others).values()))

    def pop_request(self) -> Request:
        """Take the head. The queue is not empty."""
        return (self._swapped or self._others).popitem(last=False)[1]

    def remove_request(self, request: Request) -> None:
        """Take this very request."""
        is_swapped = request.request_id in self._swapped
        del (self._swapped if is_swapped else self._others)[request.request_id]

    def _lane(self, request: Request) -> OrderedDict[str, Request]:
        return self._swapped if request.status is RequestStatus.SWAPPED else self._others


class FirstComeFirstServed(NoServiceAccounting):
    """The newest running request gives way, so that the oldest keeps its progress."""

    def __init__(self) -> None:
        self._waiting = FirstComeFirstServedQueue()

    @property
    def waiting(self) -> FirstComeFirstServedQueue:
        return self._waiting

    def new_step(self, now: float) -> None:
        """Time does not matter."""

    def check(self, request: Request) -> None:
        """
        Raises:
            ValueError: the request has a priority.
        """
        refuse_priority(request, "fcfs")

    def victim(self, running: Mapping[str, Request], requester: Request) -> Request:
        """The newest, which may be the requester."""
        in_order: Reversible[Request] = running.values()  # type: ignore[assignment]
        return next(iter(reversed(in_order)))

    def forced_victims(self, running: Mapping[str, Request]) -> list[Request]:
        """Nobody outranks anybody."""
        return []


def refuse_priority(request: Request, policy: str) -> None:
    """
    Raises:
        ValueError: the request has a priority, which only policy priority heeds.
    """
    if request.priority != 0:
        raise ValueError(
            f"priority is {request.priority}, but policy {policy} knows only 0; omit it or start "
            f"the engine with --scheduling-policy priority"
        )
