"""Requests that must be done by a time, the most urgent first."""

import heapq
import itertools

from engine_core.scheduler.aborts import Aborts
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.request import Request, RequestStatus

_MIN_CLEAN = 64


class Deadlines(SchedulerPart):
    """A heap. Requests that ended otherwise stay in it until they are on top, or until it has grown
    to twice the size that it had without them."""

    def __init__(self, aborts: Aborts) -> None:
        self._aborts = aborts
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._clean_at = _MIN_CLEAN

    def __len__(self) -> int:
        return len(self._heap)

    def on_arrival(self, request: Request) -> None:
        if request.message.timeout_s is None:
            return
        if len(self._heap) >= self._clean_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._clean_at = max(_MIN_CLEAN, 2 * len(self._heap))
        deadline_s = request.arrival_time + request.message.timeout_s
        heapq.heappush(self._heap, (deadline_s, next(self._numbers), request))

    def begin_step(self, step_id: int, now: float) -> None:
        """End unfinished requests whose time is over."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                self._end(request, now)

    def _end(self, request: Request, now: float) -> None:
        num_tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
        self._aborts.finish_requests(
            request.request_id,
            RequestStatus.FINISHED_TIMEOUT,
            f"timeout_s is {request.message.timeout_s:.6g}, and the request arrived "
            f"{now - request.arrival_time:.3f} s ago and has {num_tokens} tokens; raise "
            "timeout_s, ask for fewer tokens, or try again when fewer requests wait",
        )
