"""The third tier of an engine that computes prompts for others, or has them computed: blocks in
host memory, kept by plans or fetched."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import msgspec

from engine_core.block_transfer.fetcher import BlockFetcher
from engine_core.block_transfer.memory import BlockMemory
from engine_core.block_transfer.server import BlockServer
from engine_core.kv_cache.disk import DiskTier
from engine_core.kv_cache.host_pool import HashKey
from engine_core.kv_cache.transfers import Transfer, Transfers
from engine_core.observers.base import EnginePart, FinishedStep
from engine_core.scheduler import SchedulerOutput
from protocol.calls import EngineStatistics

_IDLE_WAIT_S = 0.005


class TransferStore(EnginePart):
    """All but `on_block` and `on_end` is called on the loop's thread.

    Args:
        keeps: whether blocks that are computed here are kept for others.
    """

    def __init__(self, memory: BlockMemory, *, keeps: bool) -> None:
        self.memory = memory
        self.tier = DiskTier(max_staged_blocks=memory.max_blocks, max_saves=memory.max_blocks)
        """The scheduler's knowledge of the blocks."""
        if not keeps:
            self.tier.stop_saving()
        self.transfers = Transfers()
        self.server: BlockServer | None = None
        self.fetcher: BlockFetcher | None = None
        self._events: deque[Callable[[], None]] = deque()
        self._has_event = threading.Event()

    def load(self, key: HashKey) -> bytes:
        """See `DiskStore`."""
        return self.tier.loading.pop(key)

    def save(self, key: HashKey, index: int, contents: bytes) -> None:
        """See `DiskStore`."""
        evicted = self.memory.put(key, contents)
        self.tier.on_written(key, is_there=True)
        self.tier.on_gone(evicted)

    def on_cache_reset(self, now_s: float) -> None:
        """At once: an idle engine plans no step that would delete them."""
        self.memory.clear()

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        """Memory answers at once: what this plan wants read the next one may load."""
        tier = self.tier
        for key in tier.to_delete:
            self.memory.delete(key)
        for key, _ in tier.to_touch:
            self.memory.get(key)
        for key in tier.to_read:
            tier.on_read(key, self.memory.get(key))
        tier.to_delete, tier.to_touch, tier.to_read = [], [], []
        for transfer in self.transfers.to_begin:
            assert self.fetcher is not None
            self.fetcher.fetch(transfer)
        self.transfers.to_begin = []

    def on_step(self, step: FinishedStep) -> None:
        """Take in what has come. A step without tokens may wait for it."""
        if self.transfers.num_under_way and not step.plan.total_num_scheduled_tokens:
            self._has_event.wait(_IDLE_WAIT_S)
        self._has_event.clear()
        while self._events:
            self._events.popleft()()

    def on_block(self, key: HashKey, contents: bytes) -> None:
        """A block was fetched."""
        evicted = self.memory.put(key, contents)
        self._events.append(partial(self._on_fetched, key, evicted))

    def on_end(self, transfer: Transfer) -> None:
        """A transfer is over."""
        self._events.append(partial(self.transfers.end, transfer))
        self._has_event.set()

    def _on_fetched(self, key: HashKey, evicted: list[HashKey]) -> None:
        self.tier.on_found([key])
        self.tier.on_gone(evicted)

    def add_statistics(self, numbers: EngineStatistics) -> EngineStatistics:
        """The numbers with those of either direction."""
        failures = Counter[str]()
        num_sent = bytes_sent = num_received = bytes_received = 0
        receive_s = 0.0
        if self.server is not None:
            num_sent, bytes_sent = self.server.num_blocks, self.server.num_bytes
            failures = self.server.failures
        if self.fetcher is not None:
            fetches = self.fetcher.fetches
            num_received, bytes_received = fetches.num_blocks, fetches.num_bytes
            receive_s, failures = fetches.receive_s, fetches.failures
        return msgspec.structs.replace(
            numbers,
            num_kv_blocks_sent=num_sent,
            num_kv_bytes_sent=bytes_sent,
            num_kv_blocks_received=num_received,
            num_kv_bytes_received=bytes_received,
            kv_receive_s=receive_s,
            num_kv_blocks_failed={why: count for why, count in failures.items() if count},
        )

    def close(self) -> None:
        for each in (self.server, self.fetcher):
            if each is not None:
                each.close()
