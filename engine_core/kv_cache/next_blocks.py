"""One more block for each of many sequences that decode one token a step, in one loop."""

from collections.abc import Sequence

from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.prefix_cache import PrefixCache
from engine_core.kv_cache.sequence_blocks import CachedSequence, SequenceBlocks


class NextBlocks:
    """What `KVCacheManager.allocate_slots(seq, 1)` does for a sequence of one table whose last
    block has just been filled, at a third of its cost:

        |- registered -|- filled: hashed and registered now -|- new -|
                       (index - 1) * block_size              index * block_size = num_computed

    Args:
        blocks_of: by sequence_id; the manager's.
    """

    def __init__(
        self,
        offload: OffloadManager,
        prefix_cache: PrefixCache,
        blocks_of: dict[str, SequenceBlocks],
    ) -> None:
        self._offload = offload
        self._prefix_cache = prefix_cache
        self._blocks_of = blocks_of

    def allocate(
        self, seqs: Sequence[CachedSequence], indexes: Sequence[int], contents: bytes
    ) -> dict[int, int]:
        """A block behind the last one for each sequence that has nothing special to it. The others
        stay as they are: a block found a second time, hashes that are missing, content spans.

        Args:
            seqs: no more than there are free blocks; each with `indexes` * block_size computed
                tokens, all known.
            indexes: of the new blocks in their tables.
            contents: of the filled blocks: their tokens as int32, little-endian, one behind the
                other.

        Returns:
            The new block of each sequence that got one, by its place in `seqs`.
        """
        blocks_of, size = self._blocks_of, len(contents) // len(seqs)
        tables = [blocks_of[seq.sequence_id] for seq in seqs]
        if self._prefix_cache.is_enabled:
            places = self._prefix_cache.register_last(seqs, tables, indexes, contents, size)
        else:
            each = enumerate(zip(tables, indexes, strict=True))
            places = [place for place, (own, index) in each if own.num_blocks == index]
        block_ids = self._offload.device.allocate(len(places))
        self._offload.pending.on_reallocated(block_ids)
        for place, block_id in zip(places, block_ids, strict=True):
            own = tables[place]
            own.tables[0].append(block_id)
            own.num_blocks += 1
        return dict(zip(places, block_ids, strict=True))
