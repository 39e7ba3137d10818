"""Engines behind a router in virtual time: which engine a request goes to, and the events."""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from scripts.simulator import SimulationError
from scripts.simulator.engine import SimulatedEngine
from scripts.traces.trace import TraceRequest

_ARRIVAL, _STEP_END, _STEP_START = range(3)
_MIN_MATCH = 0.5
"""Least share of the prompt that an engine must have been sent."""


Router = Callable[[TraceRequest, list[int]], int]
"""Chooses an engine by its number. The loads are, for each engine, the prompt tokens of the
requests that were sent to it and are not over, as far as the router knows (`Fleet`)."""
READS_LOADS = ("least-loaded", "cache-aware")


def round_robin() -> Router:
    numbers = itertools.count()
    return lambda request, loads: next(numbers) % len(loads)


def at_random(seed: int) -> Router:
    random = np.random.default_rng([seed, 2])
    return lambda request, loads: int(random.integers(len(loads)))


def least_loaded(request: TraceRequest, loads: list[int]) -> int:
    """The fewest tokens; of equals the first."""
    return loads.index(min(loads))


def sticky(request: TraceRequest, loads: list[int]) -> int:
    """Always the same engine for a session, by its hash; a request without one is its own."""
    session = request.index if request.session is None else request.session
    return hash((session, session)) % len(loads)


class CacheAware:
    """The engine that was sent the longest prefix of this prompt, unless it is overloaded.

    The rule of SGLang's router: where loads are out of balance, or less than half of the prompt is
    known anywhere, the least loaded engine (SGLang: in the second case the one with the smallest
    tree); else the one with the longest match. Where several have it, the least loaded of them.

    Prefixes that were sent are kept as hashes, not as a radix tree; beyond `max_prefixes` the
    oldest are dropped. They end where the trace's runs of text end (a system prompt, a chat's turn,
    a 512-token block of a Mooncake trace).

    Args:
        balance_tokens, balance_ratio: loads are out of balance if the chosen engine's is above the
            least by more than the first, and above it by more than the second times.
    """

    def __init__(
        self,
        *,
        balance_tokens: int = 32_768,
        balance_ratio: float = 1.5,
        max_prefixes: int = 1_000_000,
    ) -> None:
        self._balance_tokens = balance_tokens
        self._balance_ratio = balance_ratio
        self._max_prefixes = max_prefixes
        self._engines_by_prefix: collections.OrderedDict[int, dict[int, None]] = (
            collections.OrderedDict()
        )
        self._num_prompt_tokens = 0
        self._num_matched_tokens = 0

    @property
    def expected_hit_rate(self) -> float:
        """Share of all prompt tokens that the router believed to be cached where it sent them."""
        return self._num_matched_tokens / max(1, self._num_prompt_tokens)

    def __call__(self, request: TraceRequest, loads: list[int]) -> int:
        prefixes, ends = _prefixes(request)
        num_matched, holders = 0, dict[int, None]()
        for prefix, end in zip(prefixes, ends, strict=True):
            if prefix not in self._engines_by_prefix:
                break
            num_matched, holders = end, self._engines_by_prefix[prefix]
        chosen = None
        if num_matched >= _MIN_MATCH * ends[-1] and holders:
            chosen = min(holders, key=lambda engine: (loads[engine], engine))
        if chosen is None or self._is_overloaded(loads[chosen], loads):
            chosen = loads.index(min(loads))
        self._num_prompt_tokens += ends[-1]
        if chosen in holders:
            self._num_matched_tokens += num_matched
        for prefix in prefixes:
            self._engines_by_prefix.setdefault(prefix, {})[chosen] = None
            self._engines_by_prefix.move_to_end(prefix)
        while len(self._engines_by_prefix) > self._max_prefixes:
            self._engines_by_prefix.popitem(last=False)
        return chosen

    def _is_overloaded(self, load: int, loads: list[int]) -> bool:
        if load <= self._balance_tokens:
            return False  # without the search for the least, which costs most
        least = min(loads)
        return load - least > self._balance_tokens and load > self._balance_ratio * least


def _prefixes(request: TraceRequest) -> tuple[list[int], list[int]]:
    """Of each prefix of the prompt a hash and its length. Hashes of numbers are the same in every
    process."""
    prefixes, ends = [], []
    prefix = end = 0
    for segment in request.segments:
        prefix = hash((prefix, segment))
        end += segment[1]
        prefixes.append(prefix)
        ends.append(end)
    return prefixes, ends


def make_router(name: str, seed: int) -> Router:
    routers: dict[str, Callable[[], Router]] = {
        "round-robin": round_robin,
        "random": lambda: at_random(seed),
        "least-loaded": lambda: least_loaded,
        "cache-aware": CacheAware,
        "sticky": lambda: sticky,
    }
    return routers[name]()


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
        self._max_duration_s = math.inf if max_duration_s is None else max_duration_s
        self._events: list[tuple[float, int, int, TraceRequest | None]] = []
        """(time, kind, number, the request that arrives). The number is the engine's; of an arrival
        it is 1 + index for the trace's next request, -index for a chat's later turn."""
        self._view_s = view_s
        self._loads = [0] * len(engines)
        """Prompt tokens of the requests that were sent to each engine and are not over."""
        self._seen_loads = [0] * len(engines) if view_s else self._loads
        self._next_look_s = view_s or math.inf
        self._engine_of: dict[int, int] = {}
        self._will_start = [False] * len(engines)
        """There is an event to start a step at this moment."""
        self.num_requests = 0
        self.num_turns_dropped = 0
        """Of chats, one of whose requests was refused."""
        self.finished_s = 0.0
        """When the last step ended."""

    def run(self, trace: Iterable[TraceRequest]) -> None:
        """Until the trace is served."""
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
                self.finished_s = now_s
                self._remove(finished, refused, now_s)
                self._start_soon(number, now_s)
            else:
                self._will_start[number] = False
                end_s, refused = self._engines[number].start_step(now_s)
                self._remove([], refused, now_s)
                if end_s is not None:
                    heapq.heappush(self._events, (end_s, _STEP_END, number, None))

    def _push_next(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is not None:
            # above 0, and in the trace's order at one moment
            heapq.heappush(self._events, (request.arrival_s, _ARRIVAL, 1 + request.index, request))

    def _arrive(self, request: TraceRequest, now_s: float) -> None:
        number = self._router(request, self._seen_loads)
        self._loads[number] += request.num_prompt_tokens
        if self._view_s:
            self._seen_loads[number] += request.num_prompt_tokens
        self._engine_of[request.index] = number
        self.num_requests += 1
        engine = self._engines[number]
        engine.receive(request)
        if not engine.is_stepping:
            self._start_soon(number, now_s)

    def _start_soon(self, number: int, now_s: float) -> None:
        """After all that happens at this moment."""
        if not self._will_start[number]:
            self._will_start[number] = True
            heapq.heappush(self._events, (now_s, _STEP_START, number, None))

    def _remove(
        self, finished: list[TraceRequest], refused: list[TraceRequest], now_s: float
    ) -> None:
        for request in (*finished, *refused):
            self._loads[self._engine_of.pop(request.index)] -= request.num_prompt_tokens
        for request in finished:
            turn = request.next_turn(now_s)
            if turn is not None:
                heapq.heappush(self._events, (turn.arrival_s, _ARRIVAL, -turn.index, turn))
        self.num_turns_dropped += sum(len(request.later_turns) for request in refused)
