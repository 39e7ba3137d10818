"""Engines behind a router, run by a heap of events in virtual time.

Three kinds of events: a request of the trace arrives, a chat's next turn arrives, an engine's step
ends. At one moment arrivals come first, then steps that end, then steps that begin; so a batch that
arrives at once is planned at once. Only live requests are held, and the trace's next one.
"""

import heapq
from collections.abc import Iterator

from scripts.simulator.engine import SimulatedEngine
from scripts.simulator.errors import SimulationError
from scripts.simulator.router_view import RouterView
from scripts.simulator.routing import Router
from scripts.simulator.trace import Trace, TraceRequest

_ARRIVAL, _STEP_END, _STEP_START = range(3)


class Fleet:
    """
    Args:
        engines: at least one.
        max_duration_s: virtual time at which the run is broken off, with an error.
        view_s: how often the router looks at the engines' loads; 0: it always knows them.
    """

    def __init__(
        self,
        engines: list[SimulatedEngine],
        router: Router,
        max_duration_s: float | None = None,
        *,
        view_s: float = 0.0,
    ) -> None:
        self._engines = engines
        self._router = router
        self._max_duration_s = float("inf") if max_duration_s is None else max_duration_s
        self._events: list[tuple[float, int, int, TraceRequest | None]] = []
        """(time, kind, number, the request that arrives). The number is the engine's; of an arrival
        it is 1 + index for the trace's next one, -index for a chat's later turn."""
        self._view = RouterView(len(engines), view_s)
        self._engine_of: dict[int, int] = {}
        self._is_woken = [False] * len(engines)
        self.num_requests = 0
        self.num_turns_dropped = 0
        """Of chats, one of whose requests was refused."""
        self.finished_s = 0.0
        """When the last step ended."""

    def run(self, trace: Trace) -> None:
        """Until the trace is served.

        Raises:
            SimulationError: broken off, or a bad row in the trace.
        """
        requests = iter(trace)
        self._push_next(requests)
        while self._events:
            now_s, kind, number, request = heapq.heappop(self._events)
            if now_s > self._max_duration_s:
                raise not_over(self._max_duration_s, len(self._engine_of))
            if now_s >= self._view.next_look_s:
                self._view.look(now_s)
            if kind == _ARRIVAL:
                assert request is not None
                if number > 0:  # of the trace, not a later turn
                    self._push_next(requests)
                self._arrive(request, now_s)
            elif kind == _STEP_END:
                finished, refused = self._engines[number].end_step()
                self.finished_s = now_s
                self._over(finished, refused, now_s)
                self._wake(number, now_s)
            else:
                self._is_woken[number] = False
                self._start_step(number, now_s)

    def _push_next(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is not None:
            # above 0, and in the trace's order at one moment
            heapq.heappush(self._events, (request.arrival_s, _ARRIVAL, 1 + request.index, request))

    def _arrive(self, request: TraceRequest, now_s: float) -> None:
        number = self._router.choose(request, self._view.loads)
        self._view.sent(number, request.num_prompt_tokens)
        self._engine_of[request.index] = number
        self.num_requests += 1
        engine = self._engines[number]
        engine.receive(request)
        if not engine.is_stepping:
            self._wake(number, now_s)

    def _wake(self, number: int, now_s: float) -> None:
        if not self._is_woken[number]:
            self._is_woken[number] = True
            heapq.heappush(self._events, (now_s, _STEP_START, number, None))

    def _start_step(self, number: int, now_s: float) -> None:
        end_s, refused = self._engines[number].start_step(now_s)
        self._over([], refused, now_s)
        if end_s is not None:
            heapq.heappush(self._events, (end_s, _STEP_END, number, None))

    def _over(
        self, finished: list[TraceRequest], refused: list[TraceRequest], now_s: float
    ) -> None:
        for request in finished:
            self._leave(request)
            following = request.next_turn(now_s)
            if following is not None:
                heapq.heappush(
                    self._events, (following.arrival_s, _ARRIVAL, -following.index, following)
                )
        for request in refused:
            self._leave(request)
            self.num_turns_dropped += len(request.later_turns)

    def _leave(self, request: TraceRequest) -> None:
        self._view.left(self._engine_of.pop(request.index), request.num_prompt_tokens)


def not_over(max_duration_s: float, num_live: int) -> SimulationError:
    """Why a run is broken off."""
    return SimulationError(
        f"the run is not over after {max_duration_s} s of virtual time, with {num_live} requests "
        "live; lower the rate or raise --max-duration"
    )
