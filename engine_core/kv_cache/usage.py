"""What tables say about use and waste, and what must hold of them. Reads, changes nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping

from engine_core.kv_cache.sequence_blocks import NULL_BLOCK_ID, CachedSequence, SequenceBlocks


def num_wasted_slots(
    holders: Iterable[tuple[CachedSequence, SequenceBlocks]], block_size: int
) -> int:
    """Slots of held blocks behind the last token of each sequence that holds the block."""
    num_filled: dict[int, int] = {}
    for seq, held in holders:
        for table in held.tables:
            for index in range(seq.num_tokens // block_size, held.num_blocks):
                block_id = table[index]
                if block_id != NULL_BLOCK_ID:
                    filled = max(0, seq.num_tokens - index * block_size)
                    num_filled[block_id] = max(filled, num_filled.get(block_id, 0))
    return sum(block_size - filled for filled in num_filled.values())


def check_tables(tables: Mapping[str, SequenceBlocks]) -> Counter[int]:
    """Assert that tables have the shape they should. Returns the references that they hold."""
    references: Counter[int] = Counter()
    for held in tables.values():
        for table, num_dropped in zip(held.tables, held.num_dropped, strict=True):
            assert len(table) == held.num_blocks
            assert not any(table[:num_dropped])
            assert all(table[num_dropped:])
            references.update(table[num_dropped:])
        assert all(index < held.num_findable for index in held.duplicates)
        assert held.num_findable <= held.num_blocks
    return references
