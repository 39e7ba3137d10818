"""The most urgent first. Knows priorities and arrivals; no tenants, no clock.

A request's rank is (priority, arrival): smaller is more urgent. With ageing its effective priority
falls by one for each `ageing_s` seconds since its arrival:

    effective(now) = priority - (now - arrival) / ageing_s

At any moment a is more urgent than b, effective_a(now) < effective_b(now), exactly if

    priority_a * ageing_s + arrival_a  <  priority_b * ageing_s + arrival_b

since `now` is on both sides and ageing_s > 0. So the order of two requests never changes, the heap
needs no re-heaping, and no time enters: the rank is that sum, fixed on arrival, waiting or running.

Two properties follow from the fixed order:
- No thrashing. Forcing out asks for a gain of at least `min_gain` > 0 in a rank that does not
  change, so of two requests at most one can ever force the other out. (Were only waiting requests
  to age, the victim would overtake the one that forced it out, and equals would take turns.)
- No starvation, with ageing. A request of priority p is outranked only by those that arrive less
  than (p - q) * ageing_s after it, q being their priority: finitely many.
"""

import heapq
import math
import operator
from collections.abc import Callable, Iterator, Mapping

from engine_core.scheduler.policies.uncounted import NoServiceAccounting
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_status import RequestStatus

_Rank = tuple[float, float]
"""Urgency, in priorities or (ageing) in seconds; then arrival."""
_Entry = tuple[bool, _Rank, int, Request]
"""Not swapped, rank, order of joining. The last decides always, so requests are not compared."""

_FEW_DEAD = 64


def _rank(ageing_s: float | None) -> Callable[[Request], _Rank]:
    if ageing_s is None:
        return operator.attrgetter("priority", "arrival_time")

    def aged(request: Request) -> _Rank:
        return request.priority * ageing_s + request.arrival_time, request.arrival_time

    return aged


class PriorityQueue:
    """A heap. A request that is taken from its middle leaves a dead entry; when more entries are
    dead than alive they are swept out: each operation is O(log n), amortised, and memory O(n).
    Among equals new requests stand behind, preempted ones in front."""

    def __init__(self, ageing_s: float | None = None) -> None:
        self.rank = _rank(ageing_s)
        """Smaller is more urgent; fixed for a request's life."""
        self.least_urgent_popped = math.inf
        """No request that was popped has a greater urgency, unless this was lowered since."""
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(self._entries.values(), key=lambda entry: entry[:3]))

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def add_request(self, request: Request) -> None:
        """Behind its equals."""
        self._num_added += 1
        self._push(request, self._num_added)

    def prepend_request(self, request: Request) -> None:
        """To the place that its rank gives, in front of its equals."""
        self._num_added += 1
        self._push(request, -self._num_added)

    def peek_request(self) -> Request:
        """The most urgent, which stays. The queue is not empty."""
        heap = self._heap
        while self._entries.get(heap[0][3].request_id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][3]

    def pop_request(self) -> Request:
        """Take the most urgent. The queue is not empty."""
        request = self.peek_request()
        urgency, _ = heapq.heappop(self._heap)[1]
        self.least_urgent_popped = max(self.least_urgent_popped, urgency)
        del self._entries[request.request_id]
        return request

    def remove_request(self, request: Request) -> None:
        """Take this very request."""
        del self._entries[request.request_id]
        if len(self._heap) > 2 * len(self._entries) + _FEW_DEAD:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def _push(self, request: Request, order: int) -> None:
        assert request.request_id not in self._entries
        is_other = request.status is not RequestStatus.SWAPPED
        entry = (is_other, self.rank(request), order, request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)


class Priority(NoServiceAccounting):
    """The least urgent running request gives way; also to the head of the queue, if that is more
    urgent by enough.

    Args:
        min_gain: by how much the head's (effective) priority must be smaller than that of a running
            request to force it out.
        force_preemption: whether it may force out at all while memory is free.
        ageing_s: seconds that lower the effective priority by one; None: priorities are absolute,
            and an endless stream of urgent requests starves the others.

    Raises:
        ValueError: an option outside its limits.
    """

    def __init__(
        self,
        min_gain: float = 1,
        force_preemption: bool = True,
        ageing_s: float | None = None,
    ) -> None:
        if not (min_gain > 0 and math.isfinite(min_gain)):
            raise ValueError(
                f"min_gain is {min_gain}, it must be above 0, or requests would force each other "
                f"out in turn; 1 is the usual value"
            )
        if ageing_s is not None and not (ageing_s > 0 and math.isfinite(ageing_s)):
            raise ValueError(
                f"ageing_s is {ageing_s}, it must be above 0 seconds; omit it for no ageing"
            )
        self._waiting = PriorityQueue(ageing_s)
        self._min_gain = min_gain if ageing_s is None else min_gain * ageing_s
        """In units of the rank."""
        self._force_preemption = force_preemption

    @property
    def waiting(self) -> PriorityQueue:
        return self._waiting

    def new_step(self, now: float) -> None:
        """The order does not depend on the time."""

    def check(self, request: Request) -> None:
        """Every priority is served."""

    def victim(self, running: Mapping[str, Request], requester: Request) -> Request:
        """The largest (priority, arrival) of all, whether scheduled in this step or not; the newest
        of equals."""
        rank = self._waiting.rank
        return max(reversed(list(running.values())), key=rank)

    def forced_victims(self, running: Mapping[str, Request]) -> list[Request]:
        """All running requests that the head outranks by min_gain, the worst first: from the worst
        up until it does not. A swapped head forces nobody out. A step in which nobody can be
        outranked costs no search: who runs was popped, and the least urgent of those is known."""
        if not self._force_preemption or self._waiting.is_empty or not running:
            return []
        head = self._waiting.peek_request()
        if head.status is RequestStatus.SWAPPED:
            return []
        rank = self._waiting.rank
        least = rank(head)[0] + self._min_gain
        if self._waiting.least_urgent_popped < least:
            return []
        newest_first = list(reversed(list(running.values())))
        ranks = list(map(rank, newest_first))
        self._waiting.least_urgent_popped = max(ranks)[0]
        victims = [
            request
            for request, (urgency, _) in zip(newest_first, ranks, strict=True)
            if urgency >= least
        ]
        victims.sort(key=rank, reverse=True)
        return victims
