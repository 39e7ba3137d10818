"""Adapters by name, and the thread that reads their weights beside the loop."""

import dataclasses
import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from engine_core.adapters.errors import AdapterError
from engine_core.adapters.pool import AdapterPool, Prepared
from engine_core.errors import RequestRefused
from engine_core.observers.base import EnginePart, FinishedStep, Handler, Reply
from engine_core.scheduler import RequestStatus, Scheduler, SchedulerOutput
from engine_core.scheduler.rules.adapters import AdapterSlots
from engine_core.server.clients import Client
from protocol.calls import (
    AdapterInfo,
    AdapterList,
    EngineStatistics,
    LoadAdapter,
    UnloadAdapter,
)
from protocol.errors import ErrorCode, InvalidParameter
from protocol.outputs import AdaptersUpdated
from protocol.requests import EngineRequest, check_name

logger = logging.getLogger(__name__)

_MAX_NAMES = 1024
_IDLE_WAIT_S = 0.02

Job = Callable[[], None]
Finish = Callable[[str, Prepared | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    name: str
    path: Path


class Adapters(EnginePart):
    """The adapters that requests may ask for. An adapter is read when it becomes known, and again
    when a request wants it and it has no slot any more.

    Args:
        base: the model's name, which no adapter may have.
        folder: adapters may be loaded from it while the engine serves; None: from nowhere.
        on_change: called with those that there are, when that changes.
    """

    def __init__(
        self,
        pool: AdapterPool,
        scheduler: Scheduler,
        *,
        base: str,
        folder: Path | None,
        on_change: Callable[[tuple[AdapterInfo, ...]], None] = lambda adapters: None,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._slots = scheduler.parts.find(AdapterSlots)
        self._base = base
        self._folder = folder
        self._on_change = on_change
        self._fingerprint_of: dict[str, str] = {}
        self._known: dict[str, _Known] = {}
        """By fingerprint, also of names that are given to others while requests have them."""
        self._num_jobs = 0
        self._results: deque[Job] = deque()
        """Loads that have ended, for the loop's thread."""
        self._has_result = threading.Event()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="adapter-loader", daemon=True).start()

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """Those that requests may name."""
        return tuple(
            AdapterInfo(name=name, fingerprint=key) for name, key in self._fingerprint_of.items()
        )

    @property
    def is_busy(self) -> bool:
        """Whether something is being read."""
        return bool(self._num_jobs)

    def add_statistics(self, numbers: EngineStatistics) -> EngineStatistics:
        """Adapters' names for their fingerprints."""

        def named(counts: Mapping[str, int]) -> dict[str, int]:
            found: Counter[str] = Counter()
            for key, count in counts.items():
                found[self._known[key].name] += count
            return dict(found)

        return msgspec.structs.replace(
            numbers,
            max_loras=self._pool.num_slots,
            num_running_by_adapter=named(numbers.num_running_by_adapter),
            num_waiting_by_adapter=named(numbers.num_waiting_by_adapter),
        )

    def handlers(self) -> dict[type, Handler]:
        return {LoadAdapter: self._load, UnloadAdapter: self._unload}

    def _load(self, client: Client, call: LoadAdapter, reply: Reply) -> None:
        self.load(call, reply)

    def _unload(self, client: Client, call: UnloadAdapter, reply: Reply) -> AdapterList:
        return self.unload(call.name)

    def resolve(self, message: EngineRequest) -> EngineRequest:
        """The request with its adapter's fingerprint in place of the name.
        Raises RequestRefused: there is none of its name, or not the one that it began with."""
        name, began_with = message.adapter, message.adapter_fingerprint
        if name is None:
            return message
        key = self._fingerprint_of.get(name)
        if key is None:
            there = ", ".join(sorted(self._fingerprint_of)[:8]) or "none"
            raise RequestRefused(
                ErrorCode.UNKNOWN_ADAPTER,
                f"adapter {name!r:.100} is not loaded, there are: {there}; load it, or omit it",
            )
        if began_with not in (None, key):
            raise RequestRefused(
                ErrorCode.UNKNOWN_ADAPTER,
                f"adapter {name!r:.100} has other weights than those that this request began with; "
                "send it again",
            )
        return msgspec.structs.replace(message, adapter=key)

    # ------------------------------------------------------------------ names come and go

    def add(self, name: str, path: Path) -> None:
        """At the start; its weights get a slot when a request wants them. Raises AdapterError."""
        self._check_name(name, in_place=False)
        try:
            key, _ = self._pool.read(path)
        except MemoryError as error:
            raise AdapterError(f"there is no memory for {path}") from error
        self._register(name, path, key, None)

    def load(self, call: LoadAdapter, reply: Reply) -> None:
        """Read an adapter beside the loop; its name is known when the answer is given.
        Raises RequestRefused: at once, for its name or path."""
        try:
            self._check_name(call.name, in_place=call.load_inplace)
            path = self._allowed(call.path)
        except AdapterError as error:
            raise RequestRefused(ErrorCode.ADAPTER_REFUSED, str(error)) from None

        def finish(key: str, prepared: Prepared | None) -> None:
            try:
                self._check_name(call.name, in_place=call.load_inplace)  # others came meanwhile
            except AdapterError as error:
                fail(str(error))
                return
            self._register(call.name, path, key, prepared)
            self._announce()
            reply(AdapterList(adapters=self.infos))

        def fail(why: str) -> None:
            reply(RequestRefused(ErrorCode.ADAPTER_REFUSED, why))

        self._read(path, finish, fail)

    def unload(self, name: str) -> AdapterList:
        """Requests that have it go on. Raises RequestRefused: there is none of this name."""
        if name not in self._fingerprint_of:
            raise RequestRefused(
                ErrorCode.UNKNOWN_ADAPTER, f"adapter {name!r:.100} is not loaded: nothing to unload"
            )
        del self._fingerprint_of[name]
        self._forget_unused()
        self._announce()
        return AdapterList(adapters=self.infos)

    def _announce(self) -> None:
        self._on_change(self.infos)
        self.loop.broadcast(AdaptersUpdated(adapters=self.infos))

    def _register(self, name: str, path: Path, key: str, prepared: Prepared | None) -> None:
        self._fingerprint_of[name] = key
        self._known[key] = _Known(name, path)
        self._forget_unused()
        slot = self._slots.reserve(key) if prepared is not None else None
        if slot is not None:
            self.loop.note("reserve_adapter_slot", (key,))
            self._place(key, slot, prepared)
        logger.info("adapter %r is %s, from %s", name, key, path)

    def _forget_unused(self) -> None:
        """Weights that no name and no request has."""
        named = set(self._fingerprint_of.values())
        for key in [key for key in self._known if key not in named]:
            if not self._scheduler.requests_with_adapter(key):
                del self._known[key]
                self._drop(key)

    def _check_name(self, name: str, *, in_place: bool) -> None:
        try:
            check_name("the adapter's name", name)
        except InvalidParameter as error:
            raise AdapterError(str(error)) from None
        if name == self._base:
            raise AdapterError(f"{name!r} is the model's own name; give the adapter another one")
        if name in self._fingerprint_of and not in_place:
            raise AdapterError(
                f"an adapter {name!r} is there already; unload it first, or load with load_inplace"
            )
        if len(self._fingerprint_of) >= _MAX_NAMES and name not in self._fingerprint_of:
            raise AdapterError(f"{_MAX_NAMES} adapters are known, the most allowed; unload some")

    def _allowed(self, path: str) -> Path:
        """Within the operator's folder, links followed."""
        if self._folder is None:
            raise AdapterError(
                "this engine loads no adapters while it serves; start it with --adapter-dir FOLDER"
            )
        folder = self._folder.resolve()
        try:
            found = (folder / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise AdapterError(f"{path!r:.200} is no path: {error}") from None
        if not found.is_relative_to(folder):
            raise AdapterError(f"{path!r:.200} is not in the folder of --adapter-dir; put it there")
        return found

    # ------------------------------------------------------------------ weights come and go

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        """Begin to read what requests wait for. No row of the plan has what is in those slots."""
        for key, slot in self._slots.take_to_load():
            self._pool.place(slot, key, None)
            known = self._known[key]
            self._read(
                known.path,
                lambda found, prepared, key=key, slot=slot: self._on_read(  # type: ignore[misc]
                    key, slot, found, prepared
                ),
                lambda why, key=key: self._fail(key, why),  # type: ignore[misc]
            )

    def on_step(self, step: FinishedStep) -> None:
        """Between two steps. One without tokens may wait for what is being read."""
        if self._num_jobs and not step.plan.total_num_scheduled_tokens:
            self._has_result.wait(_IDLE_WAIT_S)
        self._has_result.clear()
        while self._results:
            self._results.popleft()()

    def _on_read(self, key: str, slot: int, found: str, prepared: Prepared | None) -> None:
        if found != key:
            known = self._known.get(key)
            name = "" if known is None else f" {known.name!r}"
            self._fail(key, f"the files of adapter{name} have changed; load it again")
        elif self._slots.slot_of(key) == slot and prepared is not None:
            self._place(key, slot, prepared)

    def _place(self, key: str, slot: int, prepared: Prepared | None) -> None:
        self._pool.place(slot, key, prepared)
        self._slots.on_loaded(key)
        self.loop.note("on_adapter_loaded", (key,))

    def _fail(self, key: str, why: str) -> None:
        """Its requests cannot go on. The next one tries again."""
        logger.error("an adapter is gone: %s", why)
        waiting = self._scheduler.requests_with_adapter(key)
        self._drop(key)
        self._scheduler.finish_requests(waiting, RequestStatus.FINISHED_ERROR, why)

    def _drop(self, key: str) -> None:
        slot = self._slots.drop(key)
        if slot is not None:
            self.loop.note("drop_adapter", (key,))
            self._pool.place(slot, key, None)

    def _read(self, path: Path, finish: Finish, fail: Callable[[str], None]) -> None:
        def read() -> None:
            try:
                key, prepared = self._pool.read(path)
            except (AdapterError, MemoryError) as error:
                why = str(error) or f"there is no memory for {path}"
                self._results.append(lambda: fail(why))
            except Exception as error:
                logger.exception("reading %s failed", path)
                why = f"{path} cannot be read: {type(error).__name__}: {error}"
                self._results.append(lambda: fail(why))
            else:
                self._results.append(lambda: finish(key, prepared))

        self._num_jobs += 1
        self._jobs.put(read)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._results.append(self._on_job)
            self._has_result.set()

    def _on_job(self) -> None:
        self._num_jobs -= 1
