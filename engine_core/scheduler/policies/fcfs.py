"""First come, first served."""

from collections import OrderedDict
from collections.abc import Iterator

from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.request import Request, RequestStatus


class FirstComeFirstServedQueue:
    """New requests join at the tail, preempted ones at the head, swapped ones in front of all that
    are not. Every operation is O(1): OrderedDicts rather than deques, so that an abort need not
    search. A request whose status has changed since it joined is still found."""

    def __init__(self) -> None:
        self._swapped: OrderedDict[str, Request] = OrderedDict()
        self._others: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._swapped) + len(self._others)

    def __iter__(self) -> Iterator[Request]:
        yield from self._swapped.values()
        yield from self._others.values()

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self._swapped
        assert request.request_id not in self._others
        self._lane(request)[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)
        self._lane(request).move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        return next(iter((self._swapped or self._others).values()))

    def pop_request(self) -> Request:
        return (self._swapped or self._others).popitem(last=False)[1]

    def remove_request(self, request: Request) -> None:
        is_swapped = request.request_id in self._swapped
        del (self._swapped if is_swapped else self._others)[request.request_id]

    def _lane(self, request: Request) -> OrderedDict[str, Request]:
        return self._swapped if request.status is RequestStatus.SWAPPED else self._others


class FirstComeFirstServed(SchedulingPolicy):
    """The newest running request is the victim, so that the oldest keeps its progress."""

    name = "fcfs"

    def __init__(self) -> None:
        self.waiting = FirstComeFirstServedQueue()

    def select_victim(self, running: dict[str, Request], requester: Request) -> Request:
        return next(reversed(running.values()))
