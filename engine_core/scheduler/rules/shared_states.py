"""States of recurrent layers that several prompts start from: one computes them, others wait."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from functools import partial

from engine_core.scheduler.part import SchedulerPart, Why
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request, RequestStatus
from engine_core.scheduler.request_pool import RequestPool
from protocol.explanations import WaitReason

_FIRST_CHUNK, _LONG_PROMPT = 1, 32
"""In blocks: what a prompt computes in its first step where nothing else runs or waits, if the step
would have as many as the second. The others of a crowd arrive meanwhile, and where they part ways
with it is known when the rest is computed."""


class SharedStates(SchedulerPart):
    """Where prompts part ways, by the hashes of the blocks of all unfinished requests:

        a   | 0 | 1 | 2 | 3 | 4 |     how many have a's blocks   4 4 4 2 2
        b   | 0 | 1 | 2 | 3 | 4 |     checkpoints of a           2 and 4
        c   | 0 | 1 | 2 | 5 |
        d   | 0 | 1 | 2 | 6 |         c and d wait until a's chunk with block 2 is planned

    A prompt that is being computed keeps the states from there on that later ones start from.

    Costs O(blocks) a request, and O(log blocks) for each such place.
    """

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        self._kv_cache = pool.kv_cache
        self._hashes: dict[str, list[bytes]] = {}
        """Of the full blocks before a prompt's last token, by request_id."""
        self._num_holders: Counter[bytes] = Counter()
        self._computed_by: dict[bytes, Request] = {}
        """The last request that has this block as a checkpoint since it started."""
        self._started: list[Request] = []
        """Requests whose prompts were not planned whole when they started."""

    def on_arrival(self, request: Request) -> None:
        if request.computes_whole_prompt:
            return
        hashes = self._kv_cache.hash_prompt(request.sequences[0])
        self._hashes[request.request_id] = hashes
        self._num_holders.update(hashes)
        self._started = [each for each in self._started if _computes_prompt(each)]
        for other in self._started:
            self._add_parting(other, hashes)

    def _add_parting(self, other: Request, hashes: list[bytes]) -> None:
        """A prompt is being computed that this one shares blocks with."""
        place = _num_equal(hashes, self._hashes.get(other.request_id, [])) - 1
        if (place + 1) * self._kv_cache.block_size > other.num_computed_tokens:
            first = other.unfinished[0]
            first.checkpoints = (*first.checkpoints, place)
            self._computed_by[hashes[place]] = other

    def why_wait(self, request: Request) -> Why | None:
        hashes = self._hashes.get(request.request_id)
        if hashes is None or request.status is RequestStatus.SWAPPED:
            return None
        first, size = request.unfinished[0], self._kv_cache.block_size
        first.checkpoints = places = tuple(self._partings(hashes))
        for place in reversed(places):
            if self._kv_cache.has_state(hashes[place]):
                return None
            other, stop = self._computed_by.get(hashes[place]), (place + 1) * size
            if other is None or other.status is not RequestStatus.RUNNING:
                continue
            if other.num_computed_tokens < stop:
                why = (
                    f"{other.request_id!r} is computing the state behind their {stop} equal tokens"
                )
                return WaitReason.STATE, why
        return None

    def _partings(self, hashes: list[bytes]) -> list[int]:
        """The last block that this prompt shares with as many others as all before it, and so
        on."""
        num_holders, places, start = self._num_holders, list[int](), 0
        while start < len(hashes) and (number := num_holders[hashes[start]]) > 1:
            fewer = partial(_has_fewer, num_holders, number)
            start = bisect_left(hashes, True, lo=start, key=fewer)
            places.append(start - 1)
        return places

    def limit_start(self, plan: PlanBuilder, num_tokens: int) -> int:
        size, pool = self._kv_cache.block_size, self._pool
        is_alone = plan.is_empty and not pool.running and len(pool.waiting) == 1
        return _FIRST_CHUNK * size if is_alone and num_tokens >= _LONG_PROMPT * size else num_tokens

    def on_admitted(self, request: Request, num_left: int, skipped: Iterable[Request]) -> None:
        if num_left:
            self._started.append(request)
        hashes = self._hashes.get(request.request_id, [])
        for place in request.unfinished[0].checkpoints if hashes else ():
            self._computed_by[hashes[place]] = request

    def on_finish(self, request: Request, detail: str | None, now: float) -> None:
        for name in self._hashes.pop(request.request_id, ()):
            self._num_holders[name] -= 1
            if not self._num_holders[name]:
                del self._num_holders[name]
                self._computed_by.pop(name, None)

    def check(self) -> None:
        """Assert that the index is of the unfinished requests."""
        assert self._hashes.keys() <= self._pool.by_id.keys()
        assert self._num_holders == Counter(name for each in self._hashes.values() for name in each)
        assert self._computed_by.keys() <= self._num_holders.keys()


def _computes_prompt(request: Request) -> bool:
    is_running = request.status is RequestStatus.RUNNING
    return is_running and request.num_computed_tokens < request.num_prompt_tokens


def _num_equal(hashes: list[bytes], others: list[bytes]) -> int:
    """Leading ones; behind the first that differs none is equal."""
    num_both = min(len(hashes), len(others))
    return bisect_left(range(num_both), True, key=lambda place: hashes[place] != others[place])


def _has_fewer(num_holders: Counter[bytes], number: int, name: bytes) -> bool:
    return num_holders[name] < number
