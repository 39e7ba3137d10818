"""Changes of the prefix cache, for those who ask."""

from itertools import chain, islice
from typing import NamedTuple

from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.host_pool import HashKey, HostPool
from protocol.block_hashes import joined_keys
from protocol.cache_events import MAX_SNAPSHOT_BLOCKS


class CacheChange(NamedTuple):
    """Keys of blocks, see `joined_keys`."""

    stored: bytes
    removed: bytes
    is_whole: bool
    """Nothing is cached but `stored`."""


class CacheChanges:
    """Blocks on the device and in host memory of one group: a prompt is found as far as that group
    has it. Between `stop` and `start` the pools note nothing.

    Args:
        group: one of full attention, if there is one.
    """

    def __init__(self, device: BlockPool, host: HostPool, group: int) -> None:
        self._device = device
        self._host = host
        self._group = group

    def start(self) -> None:
        if self._device.touched is None:
            self._device.touched = self._host.touched = set[HashKey]()

    def stop(self) -> None:
        self._device.touched = self._host.touched = None

    def whole(self) -> CacheChange:
        """All that is cached, at most MAX_SNAPSHOT_BLOCKS."""
        hashes = chain(self._device.hashes_of(self._group), self._host.hashes_of(self._group))
        stored = joined_keys(list(islice(hashes, MAX_SNAPSHOT_BLOCKS)))
        return CacheChange(stored, b"", is_whole=True)

    def take(self) -> CacheChange | None:
        """What has changed since the last call, as it is now; None if nothing. All that is cached
        where that is shorter, as when all was cleared."""
        touched, group = self._device.touched, self._group
        if not touched:
            return None
        hashes = [block_hash for of_group, block_hash in touched if of_group == group]
        touched.clear()
        if len(hashes) > self._device.num_hashes(group) + self._host.num_hashes:
            return self.whole()
        find, host = self._device.finder(group), self._host
        stored, removed = list[bytes](), list[bytes]()
        for each in hashes:
            is_found = find(each) is not None or host.find(group, each) is not None
            (stored if is_found else removed).append(each)
        if not hashes:
            return None
        return CacheChange(joined_keys(stored), joined_keys(removed), is_whole=False)
