"""The fleet, an engine at a time: each runs through a slice of time before the next one does.

Every event and every result is that of `fleet.Fleet`; only the order differs in which events are
worked off that do not see each other. So one engine's objects stay in the processor's caches for a
slice and are not fetched anew for each step, which a thousand engines' objects otherwise are.

    route what arrives     engine 0  ──arrive──step──step──arrive──step──step──┤ the router looks
    until the router       engine 1  ──step────────step──────arrive────step────┤ again, or here
    looks again            engine 2  ──────────────────arrive──step────────────┤ routing goes on

It needs a router that sees nothing of what happens within a slice: one that reads no loads, or that
looks at them from time to time (`RouterView`). And nothing else may join the engines: no later
turns of chats, no step model that draws random numbers in the order of all engines' steps.
"""

import array
import collections
import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from scripts.simulator.engine import SimulatedEngine
from scripts.simulator.fleet import not_over
from scripts.simulator.request_metrics import RequestMetrics
from scripts.simulator.router_view import RouterView
from scripts.simulator.routing import Router
from scripts.simulator.trace import Trace, TraceRequest

_ROUTED_AN_ENGINE = 32
"""Most requests routed ahead, a mean over engines: many steps in a row, and little memory."""


@dataclasses.dataclass(slots=True)
class _Lane:
    """One engine and what is to come for it."""

    number: int
    engine: SimulatedEngine
    arrivals: collections.deque[TraceRequest] = dataclasses.field(default_factory=collections.deque)
    end_s: float | None = None
    """Of the step that runs."""

    @property
    def is_idle(self) -> bool:
        return self.end_s is None and not self.arrivals


class SlicedFleet:
    """
    Args:
        engines: at least one; all of them have `metrics`.
        view_s: how often the router looks at the engines; 0 for a router that reads no loads.
        max_duration_s: virtual time at which the run is broken off, with an error.
    """

    def __init__(
        self,
        engines: list[SimulatedEngine],
        router: Router,
        metrics: RequestMetrics,
        *,
        view_s: float = 0.0,
        max_duration_s: float | None = None,
    ) -> None:
        assert view_s or not router.reads_loads
        self._lanes = [_Lane(number, engine) for number, engine in enumerate(engines)]
        self._router = router
        self._metrics = metrics
        self._view = RouterView(len(engines), view_s)
        self._max_duration_s = math.inf if max_duration_s is None else max_duration_s
        self._finished_s = array.array("d")
        self._finished_in = array.array("i")
        """Of each request, in the order of `metrics`: when it finished, and in which lane."""
        self._num_live = 0
        self.num_requests = 0
        self.num_turns_dropped = 0
        self.finished_s = 0.0
        """When the last step ended."""

    def run(self, trace: Trace) -> None:
        """Until the trace is served.

        Raises:
            SimulationError: broken off, or a bad row in the trace.
        """
        requests = iter(trace)
        request = next(requests, None)
        while request is not None:
            self._advance(self._view.last_look_s(request.arrival_s), is_more_to_come=True)
            self._view.look(request.arrival_s)
            request = self._route(request, requests)
        self._advance(math.inf, is_more_to_come=False)
        self._metrics.reorder(np.lexsort((self._finished_in, self._finished_s)))

    def _route(self, first: TraceRequest, others: Iterator[TraceRequest]) -> TraceRequest | None:
        """Choose engines for what arrives before the router looks again. Returns the next one."""
        request: TraceRequest | None = first
        for _ in range(_ROUTED_AN_ENGINE * len(self._lanes)):
            if request is None or request.arrival_s >= self._view.next_look_s:
                break
            assert not request.later_turns, "turns of chats need the fleet of one heap"
            number = self._router.choose(request, self._view.loads)
            self._view.sent(number, request.num_prompt_tokens)
            self._lanes[number].arrivals.append(request)
            request = next(others, None)
        return request

    def _advance(self, stop_s: float, *, is_more_to_come: bool) -> None:
        """Everything before `stop_s`, an engine at a time."""
        limit_s = math.nextafter(self._max_duration_s, math.inf)
        for lane in self._lanes:
            if not lane.is_idle:
                self._advance_lane(lane, min(stop_s, limit_s))
        if stop_s >= limit_s and (is_more_to_come or not all(lane.is_idle for lane in self._lanes)):
            raise not_over(self._max_duration_s, self._num_live)

    def _advance_lane(self, lane: _Lane, stop_s: float) -> None:
        """At one moment arrivals come first, then a step that ends, then one that begins."""
        engine, arrivals, end_s = lane.engine, lane.arrivals, lane.end_s
        while True:
            if end_s is None:
                if not arrivals or arrivals[0].arrival_s >= stop_s:
                    break
                now_s = arrivals[0].arrival_s
            elif end_s < stop_s:
                now_s = end_s
            else:
                now_s = math.nextafter(stop_s, -math.inf)
            while arrivals and arrivals[0].arrival_s <= now_s:
                engine.receive(arrivals.popleft())
                self.num_requests += 1
                self._num_live += 1
            if end_s is not None:
                if end_s >= stop_s:
                    break
                finished, refused = engine.end_step()
                self.finished_s = max(self.finished_s, now_s)
                self._over(lane, [*finished, *refused])
                self._finished_s.extend([now_s] * len(finished))
                self._finished_in.extend([lane.number] * len(finished))
            end_s, refused = engine.start_step(now_s)
            self._over(lane, refused)
        lane.end_s = end_s

    def _over(self, lane: _Lane, requests: list[TraceRequest]) -> None:
        for request in requests:
            self._view.left(lane.number, request.num_prompt_tokens)
        self._num_live -= len(requests)
