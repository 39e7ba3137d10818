"""Which engine a request goes to. A router sees what a real one would: prompts, sessions, and what
it has sent and seen finish; never an engine's inside.
"""

import collections
from typing import Protocol

import numpy as np

from scripts.simulator.errors import SimulationError
from scripts.simulator.trace import TraceRequest

_MASK = 2**64 - 1


class Router(Protocol):
    """`loads` are, for each engine, the prompt tokens of the requests that were sent to it and are
    not over, as far as the router knows (`RouterView`)."""

    @property
    def reads_loads(self) -> bool:
        """Whether they matter to it at all."""

    def choose(self, request: TraceRequest, loads: list[int]) -> int: ...


class RoundRobin:
    reads_loads = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen


class Random:
    reads_loads = False

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng([seed, 2])

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        return int(self._random.integers(len(loads)))


class LeastLoaded:
    """The fewest tokens; of equals the first."""

    reads_loads = True

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        return loads.index(min(loads))


class Sticky:
    """Always the same engine for a session, by its hash; a request without one is its own."""

    reads_loads = False

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        return scramble(request.index if request.session is None else request.session) % len(loads)


class CacheAware:
    """The engine that was sent the longest prefix of this prompt, unless it has too much to do.

    The rule of SGLang's router: where loads are out of balance, or less than half of the prompt is
    known anywhere, the least loaded engine (SGLang: in the second case the one with the smallest
    tree); else the one with the longest match. Where several have it, the least loaded of them.

    What was sent is kept as hashes of prefixes, not as a radix tree, and the oldest are forgotten
    beyond `max_prefixes`. Prefixes end where the trace's runs of text end (a system prompt, a
    chat's turn, a 512-token block of a Mooncake trace); a router of real text would cut it into
    blocks.

    Args:
        min_match: least share of the prompt that must be known.
        balance_tokens, balance_ratio: loads are out of balance if the chosen engine's is above the
            least by more than the first, and above it by more than the second times.
    """

    reads_loads = True

    def __init__(
        self,
        *,
        min_match: float = 0.5,
        balance_tokens: int = 32_768,
        balance_ratio: float = 1.5,
        max_prefixes: int = 1_000_000,
    ) -> None:
        self._min_match = min_match
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

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        prefixes, ends = _prefixes(request)
        num_matched, holders = self._match(prefixes, ends)
        self._num_prompt_tokens += ends[-1]
        chosen = None
        if num_matched >= self._min_match * ends[-1] and holders:
            chosen = min(holders, key=lambda engine: (loads[engine], engine))
            if self._is_overloaded(loads[chosen], loads):
                chosen = None
        if chosen is None:
            chosen = loads.index(min(loads))
        if chosen in holders:
            self._num_matched_tokens += num_matched
        for prefix in prefixes:
            self._engines_by_prefix.setdefault(prefix, {})[chosen] = None
            self._engines_by_prefix.move_to_end(prefix)
        while len(self._engines_by_prefix) > self._max_prefixes:
            self._engines_by_prefix.popitem(last=False)
        return chosen

    def _match(self, prefixes: list[int], ends: list[int]) -> tuple[int, dict[int, None]]:
        num_matched, holders = 0, dict[int, None]()
        for prefix, end in zip(prefixes, ends, strict=True):
            engines = self._engines_by_prefix.get(prefix)
            if engines is None:
                break
            num_matched, holders = end, engines
        return num_matched, holders

    def _is_overloaded(self, load: int, loads: list[int]) -> bool:
        if load <= self._balance_tokens:
            return False  # whatever the least is; to find it is what routing costs most
        least = min(loads)
        return load - least > self._balance_tokens and load > self._balance_ratio * least


def _prefixes(request: TraceRequest) -> tuple[list[int], list[int]]:
    """Of each prefix of the prompt a hash and its length."""
    prefixes, ends = [], []
    prefix = end = 0
    for token_id, length in request.segments:
        prefix = scramble(prefix ^ scramble(token_id << 32 | length))
        end += length
        prefixes.append(prefix)
        ends.append(end)
    return prefixes, ends


def scramble(value: int) -> int:
    """A 64-bit number that looks random, the same in every run (splitmix64's last steps)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


ROUTERS = ("round-robin", "random", "least-loaded", "cache-aware", "sticky")


def make_router(name: str, seed: int) -> Router:
    """
    Raises:
        SimulationError: an unknown name.
    """
    match name:
        case "round-robin":
            return RoundRobin()
        case "random":
            return Random(seed)
        case "least-loaded":
            return LeastLoaded()
        case "cache-aware":
            return CacheAware()
        case "sticky":
            return Sticky()
    raise SimulationError(f"the router is {name!r}, it must be one of {', '.join(ROUTERS)}")
