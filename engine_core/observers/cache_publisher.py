"""Tells clients that watch (WatchCache) what the prefix cache holds, and the load of others."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

from engine_core.kv_cache import KVCacheManager
from engine_core.observers.base import EnginePart, Handler, Reply
from engine_core.scheduler import SchedulerOutput
from engine_core.scheduler.request import request_of
from engine_core.server.clients import Client
from protocol.base import Message
from protocol.cache_events import BlockNaming, CacheEvents, load_of
from protocol.calls import CacheWatched, WatchCache
from protocol.outputs import EngineCoreOutputs
from protocol.requests import EngineRequest


@dataclasses.dataclass(slots=True)
class _Watcher:
    number: int = 0
    """The number of the next message."""
    others_load: int = 0
    """The load of other engines' clients, as it was told."""
    needs_all: bool = True


class CachePublisher(EnginePart):
    """One of the loop's observers. At most one message a step and client goes out, before the
    step's outputs: what a first token tells is cached is known by then.

    Args:
        send: False if the client's queue is full. It is told all once there is room again.
        isolates_tenants: as `RequestReader`.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        send: Callable[[Client, Message], bool],
        *,
        isolates_tenants: bool,
    ) -> None:
        self._cache = cache
        self._send = send
        self._isolates_tenants = isolates_tenants
        self._weights = cache.weights
        self._watchers: dict[Client, _Watcher] = {}
        self.loads: dict[str, tuple[int, int]] = {}
        """Client index and load of each unfinished request."""
        self.load_of_client: Counter[int] = Counter()
        self._total_load = 0

    def handlers(self) -> dict[type, Handler]:
        return {WatchCache: self.watch}

    def watch(self, client: Client, call: WatchCache, reply: Reply) -> CacheWatched:
        self._watchers.setdefault(client, _Watcher()).needs_all = True
        self._cache.changes.start()
        return CacheWatched()

    def on_departure(self, client: Client) -> None:
        self._watchers.pop(client, None)
        if not self._watchers:
            self._cache.changes.stop()

    def on_arrival(self, message: EngineRequest, client_index: int, now_s: float) -> None:
        load = load_of(len(message.prompt_token_ids), message.num_sequences)
        self.loads[message.request_id] = client_index, load
        self._add_load(client_index, load)

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        for new in plan.scheduled_new_reqs:
            request_id = request_of(new.req_id)
            if new.num_computed_tokens and request_id in self.loads and request_id == new.req_id:
                index, load = self.loads[request_id]
                num_cached = min(new.num_computed_tokens, len(new.prompt_token_ids))
                self.loads[request_id] = index, load - num_cached
                self._add_load(index, -num_cached)

    def on_outputs(self, outputs: Mapping[int, EngineCoreOutputs], now_s: float) -> None:
        for of_client in outputs.values():
            for request_id in of_client.finished_req_ids:
                index, load = self.loads.pop(request_id, (0, 0))
                self._add_load(index, -load)
        if self._watchers:
            self._publish()

    def _add_load(self, client_index: int, load: int) -> None:
        self._total_load += load
        self.load_of_client[client_index] += load
        if not self.load_of_client[client_index]:
            del self.load_of_client[client_index]

    def _publish(self) -> None:
        changes = self._cache.changes
        change = changes.take()
        if self._weights != self._cache.weights:
            self._weights = self._cache.weights
            change = changes.whole()
        for client, watcher in list(self._watchers.items()):
            others_load = self._total_load - self.load_of_client[client.index]
            own = changes.whole() if watcher.needs_all else change
            if own is None and others_load == watcher.others_load:
                continue
            events = CacheEvents(
                number=watcher.number,
                stored=b"" if own is None else own.stored,
                removed=b"" if own is None else own.removed,
                others_load=others_load,
                naming=self._naming(client) if own is not None and own.is_whole else None,
            )
            watcher.number += 1
            watcher.others_load = others_load
            watcher.needs_all = not self._send(client, events)

    def _naming(self, client: Client) -> BlockNaming:
        return BlockNaming(
            block_size=self._cache.block_size,
            weights=self._weights,
            nonce=client.nonce if self._isolates_tenants else None,
            tenant=client.rights.key_name,
        )
