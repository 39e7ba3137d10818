"""The most urgent first: the smallest (priority, arrival)."""

import heapq
import math
import operator
from collections.abc import Callable, Iterator

from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.request import Request, RequestStatus

_Rank = tuple[float, float]
"""Urgency, in priorities or (ageing) in seconds; then arrival."""
_Entry = tuple[bool, _Rank, int, Request]
"""Not swapped, rank, order of joining. The last decides always, so requests are not compared."""

_FEW_STALE = 64


def _rank(ageing_s: float | None) -> Callable[[Request], _Rank]:
    """With ageing the effective priority falls by one for each `ageing_s` seconds since arrival:

        effective(now) = priority - (now - arrival) / ageing_s

    At any moment a is more urgent than b exactly if

        priority_a * ageing_s + arrival_a  <  priority_b * ageing_s + arrival_b

    since `now` is on both sides. So the order of two requests never changes, the heap needs no
    re-heaping, and no time enters: the rank is that sum, fixed on arrival. Two properties follow:
    - No thrashing. Forcing out asks for a gain of `min_gain` > 0 in a fixed rank, so of two
      requests at most one can ever force the other out.
    - No starvation. A request of priority p is outranked only by those that arrive less than
      (p - q) * ageing_s after it, q being their priority: finitely many.
    """
    if ageing_s is None:
        return operator.attrgetter("message.priority", "arrival_time")

    def aged(request: Request) -> _Rank:
        return request.message.priority * ageing_s + request.arrival_time, request.arrival_time

    return aged


class PriorityQueue:
    """A heap. A request that is removed from its middle leaves a stale entry; when more entries are
    stale than valid they are removed: each operation is O(log n), amortised, and memory O(n).
    Among equals new requests come last, preempted ones first."""

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
        heap = list(self._entries.values())  # the first ones cost no sorting of all
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[3]

    def add_request(self, request: Request) -> None:
        """Put the request to the place that its rank gives, behind its equals."""
        self._num_added += 1
        self._push(request, self._num_added)

    def prepend_request(self, request: Request) -> None:
        """Put the request to the place that its rank gives, in front of its equals."""
        self._num_added += 1
        self._push(request, -self._num_added)

    def peek_request(self) -> Request:
        heap = self._heap
        while self._entries.get(heap[0][3].request_id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][3]

    def pop_request(self) -> Request:
        request = self.peek_request()
        urgency, _ = heapq.heappop(self._heap)[1]
        self.least_urgent_popped = max(self.least_urgent_popped, urgency)
        del self._entries[request.request_id]
        return request

    def remove_request(self, request: Request) -> None:
        del self._entries[request.request_id]
        if len(self._heap) > 2 * len(self._entries) + _FEW_STALE:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def _push(self, request: Request, order: int) -> None:
        assert request.request_id not in self._entries
        is_other = request.status is not RequestStatus.SWAPPED
        entry = (is_other, self.rank(request), order, request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)


class Priority(SchedulingPolicy):
    """The least urgent running request is the victim; also for the head of the queue, if that has
    no place and is more urgent by enough.

    Args:
        min_gain: by how much the head's (effective) priority must be smaller than that of a running
            request to force it out; above 0, or requests would force each other out in turn.
        force_preemption: whether it may force out at all.
        ageing_s: seconds that lower the effective priority by one; None: priorities are absolute,
            and an endless stream of urgent requests starves the others.
    """

    name = "priority"

    def __init__(
        self, min_gain: float = 1, force_preemption: bool = True, ageing_s: float | None = None
    ) -> None:
        self.waiting: PriorityQueue = PriorityQueue(ageing_s)
        self._min_gain = min_gain if ageing_s is None else min_gain * ageing_s
        """Least gain that lets a request force another out, in units of the rank."""
        self._force_preemption = force_preemption
        self._least_urgent: list[tuple[float, float, int, Request]] = []
        """A heap of negative ranks and numbers, of all that run and some that did; or empty."""
        self._most_entries = 0
        self._num_entered = 0

    def check(self, request: Request) -> None:
        """Every priority is allowed."""

    def select_victim(self, running: dict[str, Request], requester: Request) -> Request:
        """The largest (priority, arrival) of all, whether scheduled in this step or not; the newest
        of equals."""
        heap = self._least_urgent
        while heap and running.get(heap[0][3].request_id) is not heap[0][3]:
            heapq.heappop(heap)
        if not heap:
            heap += map(self._entry, running.values())
            heapq.heapify(heap)
            self._most_entries = 2 * len(heap) + _FEW_STALE
        return heap[0][3]

    def on_running(self, request: Request) -> None:
        """Only victims after a first one need the heap, and it forgets who left when it is full."""
        if len(self._least_urgent) >= self._most_entries:
            self._least_urgent.clear()
        if self._least_urgent:
            heapq.heappush(self._least_urgent, self._entry(request))

    def _entry(self, request: Request) -> tuple[float, float, int, Request]:
        self._num_entered += 1
        urgency, arrival = self.waiting.rank(request)
        return -urgency, -arrival, -self._num_entered, request

    def select_forced_victims(self, running: dict[str, Request]) -> list[Request]:
        """All running requests that the head outranks by min_gain. A swapped head forces none out.
        A step in which none can be outranked costs no search: running requests were popped, and the
        least urgent of those is known."""
        waiting = self.waiting
        if not self._force_preemption or not waiting or not running:
            return []
        head = waiting.peek_request()
        if head.status is RequestStatus.SWAPPED:
            return []
        rank = waiting.rank
        least = rank(head)[0] + self._min_gain
        if waiting.least_urgent_popped < least:
            return []
        newest_first = list(reversed(running.values()))
        waiting.least_urgent_popped = max(map(rank, newest_first))[0]
        victims = [request for request in newest_first if rank(request)[0] >= least]
        victims.sort(key=rank, reverse=True)
        return victims
