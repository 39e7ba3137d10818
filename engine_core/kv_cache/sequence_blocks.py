"""One sequence's block tables, and what the cache reads of a sequence."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

BlockIds = tuple[list[int], ...]
"""Physical block ids, one list a group."""

NULL_BLOCK_ID = 0
"""Never allocated: stands for blocks that fell out of reach, and for padding."""

CONTENT_HASH_BYTES = 32


class ContentSpan(NamedTuple):
    """Positions [start, stop) whose keys and values come of something else than their tokens:
    hidden states that a request gives, or an image."""

    start: int
    stop: int
    content_hash: bytes
    """Of all of it, CONTENT_HASH_BYTES long, made by this process: what a client says would let it
    name another's blocks."""


class CachedSequence(Protocol):
    """One stream of tokens, as far as the cache reads it."""

    sequence_id: str
    checkpoints: tuple[int, ...]
    """Logical blocks whose states other sequences will start from, as far as is known."""
    block_hashes: list[bytes]
    """Filled by the cache; kept until the sequence ends, preempted or not."""

    @property
    def cache_salt(self) -> str | None:
        """Only sequences with the same salt share blocks."""

    @property
    def adapter(self) -> str | None:
        """Only sequences with the same adapter share blocks."""

    @property
    def request_id(self) -> str:
        """Its request's."""

    @property
    def num_encoder_tokens(self) -> int:
        """What it attends to beside its own tokens; 0 but for encoder-decoder models."""

    @property
    def content_spans(self) -> Sequence[ContentSpan]:
        """Spans of other content, by rising positions and without overlap."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that are in the cache, or planned to be."""

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop) as int32, little-endian."""


@dataclasses.dataclass(frozen=True, slots=True)
class TableUpdate:
    """Ids to be written into a sequence's tables from logical block `start` on, in all groups."""

    start: int
    block_ids: BlockIds
    num_blocks: int
    """Logical blocks now. From the first block allocated on, the sequence alone holds them:
    up to here it may write without another allocate_slots, until a fork."""

    @property
    def is_empty(self) -> bool:
        return not any(self.block_ids)


@dataclasses.dataclass(slots=True)
class SequenceBlocks:
    """Position i of a table is logical block i; blocks out of reach are the null block, and so are
    those of a sparse group that no one is to start from."""

    tables: BlockIds
    num_blocks: int
    """Logical blocks, of which every table has a part."""
    num_registered: int
    """Leading full blocks that are in the prefix cache or noted as duplicates."""
    num_dropped: list[int]
    """Leading null blocks, a group."""
    duplicates: set[int] = dataclasses.field(default_factory=set)
    """Of the registered ones, logical blocks that were being computed while an equal block was in
    the prefix cache already: to be replaced by that one later."""
    sparse: Sequence[int] = ()
    """Groups whose tables have holes."""
    checkpoints: frozenset[int] = frozenset()
    """Logical blocks whose states other sequences may start from, beside those that every sequence
    keeps: it started from them itself, or its prompt was found up to their end."""
    encoder: list[int] = dataclasses.field(default_factory=list)
    """Blocks of what an encoder made for the request; empty but for encoder-decoder models."""

    def leading(self, num_blocks: int) -> "SequenceBlocks":
        """A copy of the first logical blocks, or of all if there are not so many; without what the
        encoder made."""
        num_blocks = min(num_blocks, self.num_blocks)
        return SequenceBlocks(
            tables=tuple([table[:num_blocks] for table in self.tables]),
            num_blocks=num_blocks,
            num_registered=min(num_blocks, self.num_registered),
            num_dropped=[min(num_blocks, num_dropped) for num_dropped in self.num_dropped],
            duplicates={index for index in self.duplicates if index < num_blocks},
            sparse=self.sparse,
            checkpoints=self.checkpoints,
        )

    def drop(self, group: int, num_dropped: int) -> list[tuple[int, int]]:
        """Make the first `num_dropped` blocks of a group null. Returns the places and ids of those
        that were real."""
        table, start = self.tables[group], self.num_dropped[group]
        stop = min(num_dropped, len(table))
        if stop <= start:
            return []
        dropped = [(i, table[i]) for i in range(start, stop) if table[i] != NULL_BLOCK_ID]
        table[start:stop] = [NULL_BLOCK_ID] * (stop - start)
        self.num_dropped[group] = stop
        return dropped

    def unregister_from(self, index: int) -> None:
        """Logical blocks from `index` on are to be registered anew once they are computed."""
        if index < self.num_registered:
            self.num_registered = index
            self.duplicates = {known for known in self.duplicates if known < index}

    def real_blocks(self) -> list[int]:
        """All blocks of all groups but the null block and the encoder's."""
        blocks: list[int] = []
        for table, num_dropped in zip(self.tables, self.num_dropped, strict=True):
            blocks += table[num_dropped:] if num_dropped else table
        return list(filter(None, blocks)) if self.sparse else blocks

    def num_held(self, group: int) -> int:
        """Blocks of a group but the null block."""
        table, num_dropped = self.tables[group], self.num_dropped[group]
        return len(table) - (table.count(NULL_BLOCK_ID) if group in self.sparse else num_dropped)

    def update_from(self, start: int) -> TableUpdate:
        """Tell what the tables hold from logical block `start` on."""
        tables = self.tables
        if len(tables) == 1:
            return TableUpdate(start, (tables[0][start:],), self.num_blocks)
        return TableUpdate(start, tuple([table[start:] for table in tables]), self.num_blocks)

    def check(self) -> None:
        """Assert that the tables have the shape they should."""
        for group, table in enumerate(self.tables):
            num_dropped = self.num_dropped[group]
            assert len(table) == self.num_blocks
            assert not any(table[:num_dropped])
            assert group in self.sparse or all(table[num_dropped:])
        assert all(index < self.num_registered for index in self.duplicates)
        assert self.num_registered <= self.num_blocks


def tail_first(holders: list[SequenceBlocks]) -> list[int]:
    """All references, from the last logical block to the first; at equal place the smaller id
    first. A sequence's head is of use to more requests than its tail."""
    if len(holders) == 1 and len(holders[0].tables) == 1:
        return holders[0].real_blocks()[::-1]
    order = [
        (-index, table[index])
        for own in holders
        for table, num_dropped in zip(own.tables, own.num_dropped, strict=True)
        for index in range(num_dropped, len(table))
        if table[index] != NULL_BLOCK_ID
    ]
    return [block_id for _, block_id in sorted(order)]
