"""Carries out what plans want of the disk, on two threads beside the loop."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from engine_core.kv_cache.disk import DiskTier
from engine_core.kv_cache.host_pool import HashKey
from engine_core.observers.base import FinishedStep, StepObserver
from engine_core.prefix_store.block_files import BlockFiles, BrokenBlock
from engine_core.scheduler import SchedulerOutput
from engine_core.server.limited_log import LimitedLog

logger = logging.getLogger(__name__)

_MAX_STAGED_BYTES = 512 << 20
_MAX_QUEUED_BYTES = 64 << 20
_MAX_READ_S = 5.0
"""After so long without a block a request no longer waits for the disk."""
_IDLE_WAIT_S = 0.02
_MAX_FLUSH_S = 5.0

Job = Callable[[], None]


class PrefixStore(StepObserver):
    """The loop's thread copies blocks to be written into a bounded queue, and takes what was read
    between two steps; files are touched by the threads alone. A reader is there for the step that
    waits, so it does not stand behind writes.

    Args:
        files: of this model and cache.
        flush_s: most seconds for the queue of writes at the end.
    """

    def __init__(self, files: BlockFiles, *, flush_s: float) -> None:
        self._files = files
        self._max_queued = max(1, _MAX_QUEUED_BYTES // files.block_bytes)
        self._flush_s = min(flush_s, _MAX_FLUSH_S)
        self.tier = DiskTier(
            max_staged_blocks=max(1, _MAX_STAGED_BYTES // files.block_bytes),
            max_saves=self._max_queued,
        )
        """The scheduler's knowledge of the blocks."""
        found, _ = files.scan()
        self.tier.on_found(found)
        logger.info("%d prefix blocks of this model are in %s", len(found), files.folder)
        if files.num_others:
            logger.info(
                "%d files there are ignored: of another model, of other settings, or no blocks",
                files.num_others,
            )
        self._log = LimitedLog(logger, logging.WARNING, time.monotonic)
        self._events: deque[Job] = deque()
        """Results of reads and writes, for the loop's thread."""
        self._num_queued = 0
        self._num_reads = 0
        self._last_read_s = 0.0
        self._has_answer = threading.Event()
        self._is_full = False
        self._has_closed = False
        self._writes: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for name, jobs in (("prefix-writer", self._writes), ("prefix-reader", self._reads)):
            threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()

    # ------------------------------------------------------------------ on the loop's thread

    def load(self, key: HashKey) -> bytes:
        """See `DiskStore`."""
        return self.tier.loading.pop(key)

    def save(self, key: HashKey, index: int, contents: bytes) -> None:
        """See `DiskStore`."""
        self._num_queued += 1
        self._writes.put(partial(self._write, key, index, contents))

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        """Before the plan is launched: what it saves is not to be deleted."""
        tier = self.tier
        for key in tier.to_delete:
            self._writes.put(partial(self._files.delete, key))
        for key, index in tier.to_touch:
            self._writes.put(partial(self._files.touch, key, index))
        if tier.to_read and not self._num_reads:
            self._last_read_s = time.monotonic()
        self._num_reads += len(tier.to_read)
        for key in tier.to_read:
            self._reads.put(partial(self._read, key))
        tier.to_delete, tier.to_touch, tier.to_read = [], [], []

    def on_step(self, step: FinishedStep) -> None:
        """Take in what the threads have done. A step without tokens may wait for a read."""
        if self._num_reads and not step.plan.total_num_scheduled_tokens:
            self._has_answer.wait(_IDLE_WAIT_S)
        self._has_answer.clear()
        while self._events:
            self._events.popleft()()
        if self._num_reads and time.monotonic() - self._last_read_s > _MAX_READ_S:
            self._log.log("slow", f"{self._files.folder} does not answer: prompts are computed")
            self.tier.give_up_reads()
            self._last_read_s = time.monotonic()
        self.tier.num_free_saves = max(0, self._max_queued - self._num_queued)

    def close(self) -> None:
        """Write what is queued, in the time that there is for it."""
        if self._has_closed:
            return
        self._has_closed = True
        flushed = threading.Event()
        self._writes.put(flushed.set)
        if not flushed.wait(self._flush_s):
            logger.warning("some prefix blocks were not written in %g s", self._flush_s)

    def _on_read(self, key: HashKey, contents: bytes | None) -> None:
        self._num_reads -= 1
        self._last_read_s = time.monotonic()
        self.tier.on_read(key, contents)

    def _on_write(self, key: HashKey, evicted: set[HashKey] | None) -> None:
        self._num_queued -= 1
        self.tier.on_written(key, is_there=evicted is not None)
        if evicted is None:
            self.tier.stop_saving()
        else:
            self.tier.on_gone(evicted)

    # ------------------------------------------------------------------ on the other threads

    def _write(self, key: HashKey, index: int, contents: bytes) -> None:
        evicted = None
        try:
            if not self._is_full:
                evicted = self._files.write(key, index, contents)
        except OSError as error:
            self._is_full = True
            logger.warning(
                "no more prefix blocks are written to %s: %s", self._files.folder, error.strerror
            )
        self._events.append(partial(self._on_write, key, evicted))

    def _read(self, key: HashKey) -> None:
        contents = None
        try:
            contents = self._files.read(key)
        except (BrokenBlock, OSError) as error:
            self._log.log("broken", f"a prefix block is computed anew: {error}")
            self._files.delete(key)
        self._events.append(partial(self._on_read, key, contents))
        if self._reads.empty():
            self._has_answer.set()


def _work(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        jobs.get()()
