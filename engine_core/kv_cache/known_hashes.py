"""What was once in the cache, in bounded memory: answers why a look-up found no more.

Knows hashes only. Never decides anything; losing all of it changes no result.
"""

from collections import OrderedDict


class EvictedHashes:
    """The `capacity` hashes that were evicted last, from device or host."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, block_hash: bytes) -> None:
        hashes = self._hashes
        hashes[block_hash] = None
        if len(hashes) > self._capacity:
            hashes.popitem(last=False)


class FirstBlocks:
    """Under which salts and adapters the tokens of a first block are known.

    Only requests with a salt or an adapter are kept: those without are in the prefix index.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._roots: OrderedDict[bytes, bytes | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._roots)

    def add(self, plain_hash: bytes, root: bytes) -> None:
        """
        Args:
            plain_hash: of the block's tokens without salt and adapter.
            root: of the salt and adapter that it has.
        """
        roots = self._roots
        known = roots.setdefault(plain_hash, root)
        if known != root:
            roots[plain_hash] = None
        if len(roots) > self._capacity:
            roots.popitem(last=False)

    def is_known_elsewhere(self, plain_hash: bytes, root: bytes) -> bool:
        """Whether these tokens were seen under another root than this one."""
        return plain_hash in self._roots and self._roots[plain_hash] != root
