"""Who waits, first come first served. Knows requests by id and nothing of budgets or blocks."""

from collections import OrderedDict
from collections.abc import Iterator

from engine_core.scheduler.request import Request


class RequestQueue:
    """New requests join at the tail, preempted ones at the head. Every operation is O(1): an
    OrderedDict rather than a deque, so that an abort need not search."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def is_empty(self) -> bool:
        return not self._requests

    def add_request(self, request: Request) -> None:
        """To the tail."""
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """To the head."""
        self.add_request(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        """The head, which stays. The queue is not empty."""
        return next(iter(self._requests.values()))

    def pop_request(self) -> Request:
        """Take the head. The queue is not empty."""
        return self._requests.popitem(last=False)[1]

    def remove_request(self, request: Request) -> None:
        """Take this very request."""
        del self._requests[request.request_id]
