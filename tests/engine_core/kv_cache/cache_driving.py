"""Does with a cache what a scheduler does, and follows each plan with a simulated memory.

Owns who runs, waits or is swapped, and the tables that a runner would have. Chooses nothing.
"""

import dataclasses

from paged_memory import PagedMemory, Stream

from engine_core.kv_cache import AllocStatus, DiskMoves, DiskTier, KVCacheManager


@dataclasses.dataclass
class Planned:
    stream: Stream
    start: int
    stop: int
    drafts: list[int]


class CacheDriver:
    """`running` holds device blocks, `swapped` host blocks, `waiting` nothing."""

    def begin(
        self,
        num_blocks,
        num_host_blocks,
        block_size,
        groups,
        caching,
        lengths,
        interval,
        disk_blocks=0,
    ):
        self.disk = None
        if disk_blocks:
            self.disk = DiskTier(max_staged_blocks=disk_blocks, max_saves=3, min_tokens=1)
        self.on_disk: dict[tuple[int, bytes], list[int]] = {}
        self.disk_events = []
        """What a disk does later: reads, and answers to writes."""
        self.has_staged = False
        self.cache = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            groups=groups,
            enable_prefix_caching=caching,
            num_host_blocks=num_host_blocks,
            disk=self.disk,
            checkpoint_interval=interval,
        )
        self.memory = PagedMemory(groups, self.cache)
        self.running: dict[str, Stream] = {}
        self.swapped: dict[str, Stream] = {}
        self.waiting: dict[str, Stream] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.plan: dict[str, Planned] = {}
        self.contents: dict[tuple[int, bytes], list[int]] = {}
        self.was_resumed: set[str] = set()
        self.num_names = 0
        self.has_admitted = self.has_preempted = False
        for num_tokens in lengths:
            self._arrive([0] * num_tokens, None, 9, 0)

    def _name(self):
        self.num_names += 1
        return f"s{self.num_names}"

    def _idle(self):
        return [name for name in self.running if name not in self.plan]

    def _victims(self):
        # an admitted sequence may hold what those before it are about to compute
        return self._idle() if self.has_admitted else list(self.running)

    def _arrive(self, tokens, salt, chunk, lookahead):
        name = self._name()
        self.waiting[name] = Stream(name, tokens, cache_salt=salt)
        self._admit(name, chunk, lookahead)

    def _admit(self, name, chunk, lookahead):
        stream = self.waiting[name]
        hit = self.cache.find_cached_prefix(stream)
        assert hit.num_tokens < stream.num_tokens
        self.cache.explain_lookup(stream, hit)
        status = self.cache.can_admit(
            stream,
            hit,
            max_chunk=chunk,
            head_room=self.cache.watermark_blocks if self.running else 0,
            is_resumed=name in self.was_resumed,
            num_lookahead_slots=lookahead,
        )
        if status is not AllocStatus.OK:
            return
        if self.cache.stage(hit):
            self.has_staged = True
            return
        del self.waiting[name]
        self.cache.allocate_cached(stream, hit)
        self.running[name] = stream
        self.was_resumed.add(name)
        stream.num_computed_tokens = hit.num_tokens
        self.tables[name] = [list(table) for table in self.cache.block_ids(stream)]
        num_tokens = min(chunk, stream.num_tokens - hit.num_tokens)
        assert self._grow(stream, num_tokens, lookahead), "can_admit said that there is room"
        self.has_admitted = True

    def _grow(self, stream, num_tokens, lookahead, drafts=()):
        """True if the tokens are planned."""
        start, stop = stream.num_computed_tokens, stream.num_computed_tokens + num_tokens
        name = stream.sequence_id
        is_single = num_tokens == 1 and stop <= self.cache.num_allocated_slots(stream)
        if not is_single:
            before = self._state()
            update = self.cache.allocate_slots(stream, num_tokens, lookahead)
            if update is None:
                assert self._state() == before
                return False
            for table, block_ids in zip(self.tables[name], update.block_ids, strict=True):
                assert update.start <= len(table)
                table[update.start :] = block_ids
            assert self.cache.num_allocated_slots(stream) >= stop + lookahead
        stream.num_computed_tokens = stop
        self.plan[name] = Planned(stream, start, stop, list(drafts))
        return True

    def _state(self):
        pool = self.cache
        return (
            [
                pool.block_ids(stream)
                for stream in self.running.values()
                if stream.sequence_id in pool._blocks_of
            ],
            pool.num_blocks_free,
            pool.num_blocks_cached,
            pool.host.num_cached,
            pool.host.num_pinned,
        )

    def _refund(self, name):
        planned = self.plan.pop(name, None)
        if planned is not None:
            planned.stream.num_computed_tokens = planned.start

    def _recompute(self, name):
        stream = self.waiting[name] = self.running.pop(name)
        self.cache.free(stream)
        stream.num_computed_tokens = 0
        del self.tables[name]
        self.has_preempted = True

    def _run_plan(self, swap_out_first):
        copies = self.cache.take_copies()
        if self.disk is not None:
            self._move_to_and_from_disk(copies.disk or DiskMoves([], []))
        self.memory.execute(copies, swap_out_first=swap_out_first)
        for name, planned in self.plan.items():
            tokens = planned.stream.tokens + planned.drafts
            self.memory.write(
                planned.stream, self.tables[name], tokens, planned.start, planned.stop
            )
            self.memory.read(planned.stream, self.tables[name], tokens, planned.start, planned.stop)

    def _move_to_and_from_disk(self, moves):
        for key in self.disk.to_delete:
            self.on_disk.pop(key, None)
        for key, block_id in moves.load:
            self.memory.blocks[block_id] = self.disk.loading.pop(key)
        for key, _, block_id in moves.save:
            self.on_disk[key] = self.memory.blocks[block_id].copy()
            self.disk_events.append(("written", key))
        self.disk_events += [("read", key) for key in self.disk.to_read]
        self.disk.to_delete, self.disk.to_read = [], []
        self.disk.num_free_saves = 3 - sum(kind == "written" for kind, _ in self.disk_events)

    def _finish_on_disk(self, event, *, is_lost):
        self.disk_events.remove(event)
        kind, key = event
        if is_lost:
            self.on_disk.pop(key, None)
        if kind == "written":
            self.disk.on_written(key, is_there=key in self.on_disk)
        else:
            contents = self.on_disk.get(key)
            self.disk.on_read(key, None if contents is None else contents.copy())

    def _check_contents(self):
        """What can be found, and what waits on the host, is what it is said to be."""
        offload = self.cache._offload
        streams = [*self.running.values(), *self.swapped.values(), *self.waiting.values()]
        for stream in streams:
            for index, block_hash in enumerate(stream.block_hashes):
                for group in range(len(self.cache.groups)):
                    self.contents[group, block_hash] = self.memory.record(
                        stream, stream.tokens, index, group
                    )
        indexed = [
            ((group, block_hash), block_id)
            for group, index in enumerate(offload.device._index)
            for block_hash, block_id in index.items()
        ]
        for key, block_id in [*indexed, *offload.host._index.items()]:
            if key in self.contents:
                contents = self.contents[key]
                assert self.memory.blocks[block_id][: len(contents)] == contents
        if self.disk is not None:
            for key, contents in [*self.on_disk.items(), *self.disk.staged.items()]:
                if key in self.contents:
                    assert contents[: len(self.contents[key])] == self.contents[key]
        for name, stream in self.swapped.items():
            tables = self.cache._swapped._tables[name].tables
            stop = stream.num_computed_tokens
            self.memory.read(stream, tables, stream.tokens, stop, stop)
