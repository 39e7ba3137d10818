"""Adapters by name: what becomes of one whose files change behind its name."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core.adapters.host import Adapters
from engine_core.scheduler import RequestStatus

STEP = SimpleNamespace(plan=SimpleNamespace(total_num_scheduled_tokens=0))


class Pool:
    """A pool of one slot, and a folder whose fingerprint the test says."""

    num_slots = 1

    def __init__(self):
        self.found = "old"
        self.placed = []

    def read(self, _path):
        return self.found, f"weights of {self.found}"

    def place(self, slot, key, prepared):
        self.placed.append((slot, key, prepared))


class Slots:
    """Of a scheduler in which a request wants `old`."""

    def __init__(self):
        self.slot = 0
        self.loaded = []
        self.on_loaded = self.loaded.append

    def take_to_load(self):
        return [("old", 0)]

    def slot_of(self, key):
        return self.slot if key == "old" else None

    def drop(self, _key):
        slot, self.slot = self.slot, None
        return slot


@pytest.mark.parametrize("now", ["old", "new"])
def test_an_adapter_whose_files_have_changed_gets_no_slot_under_its_old_fingerprint(now):
    ended, slots = [], Slots()
    scheduler = SimpleNamespace(
        parts=SimpleNamespace(find=lambda _kind: slots),
        requests_with_adapter=lambda _key: ["r"],
        finish_requests=lambda ids, status, why: ended.append((ids, status, why)),
    )
    pool = Pool()
    adapters = Adapters(pool, scheduler, base="m", folder=None)
    adapters.join(SimpleNamespace(note=lambda *_what: None))
    adapters.add("a", Path("a"))
    pool.found = now
    adapters.on_plan(None, 0.0)
    for _ in range(500):
        if not adapters.is_busy:
            break
        adapters.on_step(STEP)
    weights = [prepared for _, _, prepared in pool.placed if prepared is not None]
    if now == "old":
        assert (weights, slots.loaded, ended) == (["weights of old"], ["old"], [])
        return
    assert (weights, slots.loaded) == ([], [])
    ((ids, status, why),) = ended
    assert (ids, status) == (["r"], RequestStatus.FINISHED_ERROR)
    assert why == "the files of adapter 'a' have changed; load it again"
