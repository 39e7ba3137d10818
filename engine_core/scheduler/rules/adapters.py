"""Which adapters have a slot beside the model: a request runs only while its adapter has one.

Slots of running requests are theirs; others are given away, the least recently used first."""

from collections.abc import Iterable

from engine_core.scheduler.part import SchedulerPart, Why
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from protocol.explanations import WaitReason

_MAX_PASSED = 32
"""A request whose adapter finds no slot is passed by so many others with adapters. Then none behind
it starts, so that one of the adapters in use comes to its end."""


class AdapterSlots(SchedulerPart):
    """
    Args:
        num_slots: most adapters in use at once; None: no limit.
        loads: an adapter must be loaded when it gets a slot: it is ready when `on_loaded` says so.
    """

    def __init__(self, pool: RequestPool, num_slots: int | None, *, loads: bool) -> None:
        self._pool = pool
        self._num_slots = num_slots
        self._loads = loads
        self._slot_of: dict[str, int] = {}
        """Slots by adapter, the least recently used first."""
        self._loading: set[str] = set()
        self._to_load: list[tuple[str, int]] = []
        self._in_use: set[str] = set()
        self._gives_way = False

    # ------------------------------------------------------------------ in one step's pass

    def begin_pass(self, plan: PlanBuilder) -> None:
        """Note which adapters are in use."""
        self._gives_way = False
        self._in_use = set() if self._num_slots is None else self._of_running()

    def _of_running(self) -> set[str]:
        return _adapters_of(self._pool.running.values())

    def why_wait(self, request: Request) -> Why | None:
        """Why this request, the next in the queue, may not start. Finds a slot for its adapter."""
        adapter, limit = request.adapter, self._num_slots
        if adapter is None or limit is None:
            return None
        if self._gives_way:
            why = (
                f"a request ahead of it was passed {_MAX_PASSED} times, as its adapter has no slot"
            )
            return WaitReason.ADAPTERS, why
        if adapter not in self._slot_of and not self._find_slot(adapter):
            self._gives_way = request.num_passed >= _MAX_PASSED
            return WaitReason.ADAPTERS, f"the adapters in use are {limit}, the most allowed"
        if adapter in self._loading:
            return WaitReason.ADAPTER_LOADING, "its adapter's weights are being loaded"
        return None

    def lacks(self, request: Request, others: Iterable[Request]) -> bool:
        """Whether it could not start beside these others, for its adapter."""
        adapter = request.adapter
        if adapter is None or self._num_slots is None:
            return False
        if adapter in self._slot_of:
            return adapter in self._loading
        return len(_adapters_of(others) | self._loading) >= self._num_slots

    def on_admitted(self, request: Request, num_left: int, skipped: Iterable[Request]) -> None:
        adapter = request.adapter
        if adapter is None or self._num_slots is None:
            return
        self._in_use.add(adapter)
        self._slot_of[adapter] = self._slot_of.pop(adapter)
        request.num_passed = 0
        for other in skipped:
            if other.adapter is not None and other.adapter not in self._slot_of:
                other.num_passed += 1

    def _find_slot(self, adapter: str) -> bool:
        """A free one, or that of the adapter whose last use is longest ago."""
        assert self._num_slots is not None
        if len(self._slot_of) < self._num_slots:
            slot = min(set(range(self._num_slots)) - set(self._slot_of.values()))
        else:
            kept = self._in_use | self._loading
            victim = next((each for each in self._slot_of if each not in kept), None)
            if victim is None:
                return False
            slot = self._slot_of.pop(victim)
        self._slot_of[adapter] = slot
        if self._loads:
            self._loading.add(adapter)
            self._to_load.append((adapter, slot))
        return True

    # ------------------------------------------------------------------ what has been loaded

    def take_to_load(self) -> list[tuple[str, int]]:
        """Adapters that requests wait for since the last call, and the slots that their weights go
        to, whatever was there before; `on_loaded` says that they are there."""
        taken, self._to_load = self._to_load, []
        return taken

    def on_loaded(self, adapter: str) -> None:
        """Its weights are in its slot: its requests may start. A replay may begin behind the plan
        that found the slot."""
        if adapter not in self._slot_of:
            self._find_slot(adapter)
        self._loading.discard(adapter)

    def reserve(self, adapter: str) -> int | None:
        """A slot for an adapter that no request asked for yet, to be loaded at once; None: it has
        one, or there is none."""
        self._in_use = self._of_running()
        if adapter in self._slot_of or not self._find_slot(adapter):
            return None
        self._to_load.pop()
        return self._slot_of[adapter]

    def drop(self, adapter: str) -> int | None:
        """Take its slot, which is returned, for others. No request that runs has it."""
        self._loading.discard(adapter)
        self._to_load = [each for each in self._to_load if each[0] != adapter]
        return self._slot_of.pop(adapter, None)

    def on_new_runner(self) -> None:
        """All slots are empty, and what is being loaded is not wanted."""
        self._slot_of.clear()
        self._loading.clear()
        self._to_load.clear()

    def slot_of(self, adapter: str) -> int | None:
        """The slot of an adapter, loaded or not; None: it has none."""
        return self._slot_of.get(adapter)

    def check(self) -> None:
        """Assert that slots are of one adapter each."""
        slots = list(self._slot_of.values())
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < (self._num_slots or 0) for slot in slots)
        assert self._loading <= self._slot_of.keys()


def _adapters_of(requests: Iterable[Request]) -> set[str]:
    return {request.adapter for request in requests if request.adapter is not None}
