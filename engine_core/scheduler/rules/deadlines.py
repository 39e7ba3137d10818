"""Requests that must be done by a time, the most urgent first."""

import heapq
import itertools

from engine_core.scheduler.request import Request

_MIN_CLEAN = 64


class Deadlines:
    """A heap. Requests that ended otherwise stay in it until they are on top, or until it has grown
    to twice the size that it had without them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._clean_at = _MIN_CLEAN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        if request.message.timeout_s is None:
            return
        if len(self._heap) >= self._clean_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._clean_at = max(_MIN_CLEAN, 2 * len(self._heap))
        deadline_s = request.arrival_time + request.message.timeout_s
        heapq.heappush(self._heap, (deadline_s, next(self._numbers), request))

    def take_expired(self, now_s: float) -> list[Request]:
        """Unfinished requests whose time is over, each once."""
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                expired.append(request)
        return expired
