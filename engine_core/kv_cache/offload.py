"""Device and host blocks, and those on disk: a cached block is saved to host memory when it becomes
free, so what the device evicts later can be copied back."""

from collections.abc import Collection, Sequence

from engine_core.kv_cache.block_counts import BlockCounts, of_pool
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.copies import CacheCopies, PendingCopies
from engine_core.kv_cache.disk import DiskTier
from engine_core.kv_cache.host_pool import HashKey, HostPool


class OffloadManager:
    """What a step saves can be found on the host from the next step on.

    Args:
        num_blocks: on the device, of each pool if there are several.
        num_host_blocks: in host memory, likewise; 0 for none.
        num_groups: KV-cache groups.
        disk: None for none.
    """

    def __init__(
        self,
        *,
        num_blocks: int | Sequence[int],
        num_host_blocks: int | Sequence[int],
        num_groups: int,
        disk: DiskTier | None,
    ) -> None:
        self.disk = disk
        self.device = BlockPool(num_blocks=num_blocks, num_groups=num_groups)
        num_pools = len(self.device.ids.sizes)
        if isinstance(num_host_blocks, int):
            num_host_blocks = [num_host_blocks] * num_pools
        self.host = HostPool(
            first_id=self.device.num_blocks + 1,
            sizes=num_host_blocks,
            evicted=self.device.evicted,
        )
        self.pending = PendingCopies()
        self.filling: set[int] = set()
        """Blocks in the prefix cache whose last tokens this step computes."""

    @property
    def copy_targets(self) -> BlockCounts:
        """Device blocks that can be taken now to swap into."""
        device = self.device
        return device.free - device.free_of(self.pending.must_stay)

    def locate(self, group: int, block_hash: bytes) -> int | None:
        """The device block with these contents, else the host block, which has a larger id."""
        block_id = self.device.find(group, block_hash)
        if block_id is not None:
            return block_id
        host_block = self.host.find(group, block_hash)
        if host_block is None or self.pending.is_filled_now(host_block):
            return None
        return host_block

    def is_found(self, group: int, block_hash: bytes) -> bool:
        """Whether these contents are on device, host or disk."""
        if self.locate(group, block_hash) is not None:
            return True
        return self.disk is not None and (group, block_hash) in self.disk

    def is_anywhere(self, block_hash: bytes) -> bool:
        """Whether any group has a block with these contents, on device, host or disk."""
        return any(self.is_found(group, block_hash) for group in range(self.device.num_groups))

    # ------------------------------------------------------------------ taking

    def allocate(self, num_blocks: int, pool: int = 0) -> list[int]:
        """Device blocks to compute or copy into, one reference each. The caller has checked how
        many of the pool are free."""
        block_ids = self.device.allocate(num_blocks, pool)
        self.pending.on_reallocated(block_ids)
        return block_ids

    def allocate_to_swap_in(self, host_blocks: list[int]) -> list[int]:
        """A device block for each host block, one reference each, and the copies. The caller has
        checked `copy_targets`."""
        for host_block in host_blocks:
            self.host.touch(host_block)
            self.host.begin_read(host_block)
        pool_of = self.host.ids.pool_of
        block_ids = self._allocate_copy_targets([pool_of[block] for block in host_blocks])
        for host_block, block_id in zip(host_blocks, block_ids, strict=True):
            self.pending.add_swap_in(host_block, block_id)
        return block_ids

    def allocate_to_load(self, keys: list[HashKey], pools: list[int]) -> list[int]:
        """A device block for each block that was read from disk, as `allocate_to_swap_in`, each of
        its pool."""
        assert self.disk is not None
        self.disk.begin_load(keys)
        block_ids = self._allocate_copy_targets(pools)
        for key, block_id in zip(keys, block_ids, strict=True):
            self.pending.add_load(key, block_id)
        return block_ids

    def _allocate_copy_targets(self, pools: list[int]) -> list[int]:
        """A block of each of these pools."""
        taken = {}
        for pool in set(pools):
            num_blocks = pools.count(pool)
            self._cancel_saves(num_blocks, pool)
            avoid = self.pending.must_stay | self.pending.being_saved
            taken[pool] = self.device.allocate(num_blocks, pool, avoid)
            self.pending.on_reallocated(taken[pool])
        if len(taken) == 1:
            return taken[pools[0]]
        left = {pool: iter(block_ids) for pool, block_ids in taken.items()}
        return [next(left[pool]) for pool in pools]

    def _cancel_saves(self, num_wanted: int, pool: int) -> None:
        """As many as needed, so that `num_wanted` blocks of a pool can be swapped into."""
        device, pending = self.device, self.pending
        free, kept = device.free, device.free_of(pending.must_stay | pending.being_saved)
        num_usable = of_pool(free - kept, pool)
        for block_id in list(pending.being_saved):
            if num_usable >= num_wanted:
                break
            if device.ids.pool_of[block_id] != pool or block_id in pending.must_stay:
                continue
            if device.ref_count(block_id) == 0:
                host_block = pending.cancel_save(block_id)
                assert host_block is not None
                self.host.unindex(host_block)
                num_usable += 1

    # ------------------------------------------------------------------ giving back

    def release(self, block_ids: Collection[int]) -> None:
        """One reference less to each, in this order: what comes first is evicted first."""
        if self.filling:
            self._unindex_unfilled(block_ids)
        newly_cached = self.device.release(block_ids)
        if self.host.num_blocks:
            for block_id in newly_cached:
                self._save(block_id)

    def _unindex_unfilled(self, block_ids: Collection[int]) -> None:
        """This step no longer computes what it was to write into these blocks."""
        for block_id in block_ids:
            if block_id in self.filling and self.device.ref_count(block_id) == 1:
                self.filling.discard(block_id)
                self.device.unindex([block_id])

    def _save(self, block_id: int) -> None:
        """Copy the block to the host too, if there is room and it is not there."""
        block_hash, group = self.device.hash_of(block_id), self.device.group_of(block_id)
        assert block_hash is not None
        known = self.host.find(group, block_hash)
        if known is not None:
            self.host.touch(known)
            return
        pool = self.device.ids.pool_of[block_id]
        if self.host.num_available(pool) and block_id not in self.pending.written:
            host_block = self.take_host_block(pool)
            self.host.register(host_block, group, block_hash)
            self.pending.add_swap_out(block_id, host_block, is_optional=True)

    def take_host_block(self, pool: int) -> int:
        """Take a host block, to be registered or pinned before the next is taken."""
        host_block = self.host.take(pool)
        self.pending.cancel_swap_out(host_block)
        return host_block

    # ------------------------------------------------------------------ forgetting

    def unindex(self, group: int, block_hash: bytes) -> None:
        """Remove these contents from the index of the device and of the host, and from disk."""
        if self.disk is not None:
            self.disk.forget([(group, block_hash)])
        block_id = self.device.find(group, block_hash)
        if block_id is not None:
            self.filling.discard(block_id)
            self.device.unindex([block_id])
        host_block = self.host.find(group, block_hash)
        if host_block is not None:
            self.host.unindex(host_block)
            if not self.host.is_pinned(host_block):
                self.pending.cancel_swap_out(host_block)

    def evict_cached(self) -> int:
        """Evict every block, of device and host, that is not in use. Returns how many."""
        host_blocks = self.host.evict_cached()
        for host_block in host_blocks:
            self.pending.cancel_swap_out(host_block)
        return self.device.evict_cached() + len(host_blocks)

    def take_copies(self) -> CacheCopies:
        """Give the copies of the step that is planned now, and is going to run."""
        moves, pending = None, self.pending
        if self.disk is not None:
            unfilled = self.filling | pending.written
            moves = self.disk.take(self.device, unfilled=unfilled, loads=pending.loads)
        self.filling.clear()
        self.host.end_reads()
        return pending.take(moves)

    def check(self) -> None:
        """Assert what must hold of the pools and of the pending copies."""
        self.device.check()
        self.host.check()
        self.pending.check()
        if self.disk is not None:
            self.disk.check()
        assert all(self.device.hash_of(block_id) is not None for block_id in self.filling)
