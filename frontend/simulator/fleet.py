"""Engines behind a router in virtual time: which engine a request goes to, and the events."""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from engine_core.kv_cache.changes import CacheChange
from frontend.fleet.prefix_index import PrefixIndex
from frontend.fleet.router import ROUTING_POLICIES, Choice, RoutingPolicy, home_of
from frontend.fleet.router import Router as ClientsRouter
from frontend.load.traces.trace import TraceRequest
from frontend.simulator import SimulationError
from frontend.simulator.engine import SimulatedEngine
from protocol.block_hashes import block_keys, root_hash
from protocol.cache_events import load_of

_ARRIVAL, _STEP_END, _STEP_START = range(3)
_ROOT = root_hash(adapter=None, cache_salt=None)

Router = Callable[[TraceRequest, list[int]], Choice]
"""Chooses an engine, by its number. The loads are, for each engine, those of the requests that were
sent to it and are not over (`load_of`), as far as the router knows (`Fleet`)."""
READS_LOADS = ROUTING_POLICIES


def round_robin() -> Router:
    numbers = itertools.count()
    return lambda request, loads: Choice(next(numbers) % len(loads), 0)


def at_random(seed: int) -> Router:
    random = np.random.default_rng([seed, 2])
    return lambda request, loads: Choice(int(random.integers(len(loads))), 0)


class PolicyRouter:
    """The client's router and index of prefixes, which engines tell of their caches."""

    def __init__(self, policy: RoutingPolicy, block_size: int) -> None:
        self._router = ClientsRouter(policy)
        self._index = PrefixIndex(max_blocks=1_000_000)
        self._block_size = block_size
        self._home = functools.lru_cache(100_000)(
            lambda session, num_engines: home_of(session, [*map(str, range(num_engines))])
        )

    def __call__(self, request: TraceRequest, loads: list[int]) -> Choice:
        size = self._block_size
        keys = block_keys(_ROOT, request.prompt().tobytes(), size)
        matched = {
            engine: length * size
            for engine, length in self._index.match(keys, range(len(loads))).items()
        }
        session = request.session
        home = None if session is None else self._home(str(session), len(loads))
        chosen = self._router.choose(matched, request.num_prompt_tokens, loads, home)
        assert chosen is not None, "every engine may be chosen"
        self._index.use(chosen.engine, keys)
        return chosen

    def on_change(self, engine: int, change: CacheChange) -> None:
        self._index.update(engine, change.stored, change.removed, is_whole=change.is_whole)


def make_router(name: str, seed: int, block_size: int = 16) -> Router:
    for policy in ROUTING_POLICIES:
        if name == policy:
            return PolicyRouter(policy, block_size)
    return round_robin() if name == "round-robin" else at_random(seed)


# ---------------------------------------------------------------------- fleet


class Fleet:
    """A heap of events. At one moment arrivals come first, then steps that end, then steps that
    begin; so requests that arrive at once are planned at once. Only unfinished requests are
    held, and the trace's next one.

    Args:
        engines: at least one.
        max_duration_s: virtual time at which the run is broken off, with an error.
        view_s: the router looks at the engines' loads at 0, view_s, 2 view_s ..., before anything
            else that happens at that moment; between two looks it knows what it has sent since,
            but not what has finished. 0: it always knows them.
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
        self._told = router.on_change if isinstance(router, PolicyRouter) else None
        if self._told is not None:
            for engine in engines:
                engine.changes.start()
        self._max_duration_s = math.inf if max_duration_s is None else max_duration_s
        self._events: list[tuple[float, int, int, TraceRequest | None]] = []
        """(time, kind, number, the request that arrives). The number is the engine's; of an arrival
        it is 1 + index for the trace's next request, -index for a chat's later turn."""
        self._view_s = view_s
        self._loads = [0] * len(engines)
        """Of the requests that were sent to each engine and are not over."""
        self._seen_loads = [0] * len(engines) if view_s else self._loads
        self._next_look_s = view_s or math.inf
        self._engine_of: dict[int, tuple[int, int]] = {}
        """The engine of each unfinished request, and its load there."""
        self._will_start = [False] * len(engines)
        """There is an event to start a step at this moment."""
        self._num_prompt_tokens = self._num_matched_tokens = 0
        self.num_requests = 0
        self.num_turns_dropped = 0
        """Turns of chats, one of whose requests was refused."""
        self.finished_s = 0.0
        """When the last step ended."""

    @property
    def expected_hit_rate(self) -> float:
        """Share of all prompt tokens that the router believed to be cached where it sent them."""
        return self._num_matched_tokens / max(1, self._num_prompt_tokens)

    def run(self, trace: Iterable[TraceRequest]) -> None:
        """Go on until the trace is served."""
        requests = iter(trace)
        self._push_next(requests)
        while self._events:
            now_s, kind, number, request = heapq.heappop(self._events)
            if now_s > self._max_duration_s:
                raise SimulationError(
                    f"the run is not over after {self._max_duration_s} s of virtual time, with "
                    f"{len(self._engine_of)} requests live; lower the rate or raise --max-duration"
                )
            if now_s >= self._next_look_s:
                self._seen_loads[:] = self._loads
                # the next multiple of the period above now, though the quotient is rounded
                self._next_look_s = (math.floor(now_s / self._view_s) + 1) * self._view_s
                if self._next_look_s <= now_s:
                    self._next_look_s += self._view_s
            if kind == _ARRIVAL:
                assert request is not None
                if number > 0:  # of the trace, not a later turn
                    self._push_next(requests)
                self._arrive(request, now_s)
            elif kind == _STEP_END:
                finished, refused = self._engines[number].end_step()
                if self._told is not None:
                    change = self._engines[number].changes.take()
                    if change is not None:
                        self._told(number, change)
                self.finished_s = now_s
                self._remove(finished, refused, now_s)
                self._start_soon(number, now_s)
            else:
                self._will_start[number] = False
                engine = self._engines[number]
                if not engine.may_start:
                    continue
                end_s, refused = engine.start_step(now_s)
                self._remove([], refused, now_s)
                if end_s is not None:
                    heapq.heappush(self._events, (end_s, _STEP_END, number, None))
                    if engine.may_start:
                        self._start_soon(number, engine.free_s)

    def _push_next(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is not None:
            # above 0, and in the trace's order at one moment
            heapq.heappush(self._events, (request.arrival_s, _ARRIVAL, 1 + request.index, request))

    def _arrive(self, request: TraceRequest, now_s: float) -> None:
        number, num_matched = self._router(request, self._seen_loads)
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_matched_tokens += num_matched
        load = load_of(request.num_prompt_tokens - num_matched)
        self._loads[number] += load
        if self._view_s:
            self._seen_loads[number] += load
        self._engine_of[request.index] = number, load
        self.num_requests += 1
        engine = self._engines[number]
        engine.receive(request)
        if engine.may_start:
            self._start_soon(number, now_s)

    def _start_soon(self, number: int, now_s: float) -> None:
        """After all that happens at this moment, or when the first stage is free."""
        now_s = max(now_s, self._engines[number].free_s)
        if not self._will_start[number]:
            self._will_start[number] = True
            heapq.heappush(self._events, (now_s, _STEP_START, number, None))

    def _remove(
        self, finished: list[TraceRequest], refused: list[TraceRequest], now_s: float
    ) -> None:
        for request in (*finished, *refused):
            number, load = self._engine_of.pop(request.index)
            self._loads[number] -= load
        for request in finished:
            turn = request.next_turn(now_s)
            if turn is not None:
                heapq.heappush(self._events, (turn.arrival_s, _ARRIVAL, -turn.index, turn))
        self.num_turns_dropped += sum(len(request.later_turns) for request in refused)
