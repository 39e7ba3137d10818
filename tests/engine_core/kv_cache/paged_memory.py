"""Sequences, and a memory whose slots say which prefix was written to them.

Stands where runner and model stand: executes copies in any order that the contract allows, writes
the tokens of a plan through tables that it keeps from updates alone, and asserts before every read
that each token that attention may see is in its slot, put there by the same prefix.
"""

import bisect
import dataclasses
import itertools
from array import array

from engine_core.kv_cache import (
    NULL_BLOCK_ID,
    CacheCopies,
    ContentSpan,
    KVCacheGroupSpec,
    KVCacheManager,
)


@dataclasses.dataclass
class Stream:
    """All that the cache reads of a sequence."""

    sequence_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    cache_salt: str | None = None
    adapter: str | None = None
    content_spans: tuple[ContentSpan, ...] = ()
    num_hashed_bytes: int = 0
    num_encoder_tokens: int = 0
    num_prompt_tokens: int = 0
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self):
        self.num_prompt_tokens = len(self.tokens)

    @property
    def request_id(self) -> str:
        return self.sequence_id.partition("#")[0]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def token_bytes(self, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(self.tokens)
        self.num_hashed_bytes += 4 * (stop - start)
        return array("i", self.tokens[start:stop]).tobytes()


def marker(stream: Stream, tokens: list[int], position: int, group: int) -> int:
    """Of a slot that holds what this position's keys and values would be."""
    salt = (stream.cache_salt, stream.adapter)
    return hash((group, salt, tuple(tokens[: position + 1])))


def compute(cache, stream, num_tokens=None):
    """One step: tokens of the stream, all that are left if not said."""
    num_tokens = num_tokens or stream.num_tokens - stream.num_computed_tokens
    update = cache.allocate_slots(stream, num_tokens)
    if update is not None:
        stream.num_computed_tokens += num_tokens
    cache.check([stream] if update is not None else ())
    cache.take_copies()
    return update


def probe(tokens, **options):
    return Stream("probe", tokens, **options)


def hit_of(cache, tokens, **options):
    return cache.find_cached_prefix(probe(tokens, **options))


def make_cache(num_blocks=20, block_size=4, **options):
    return KVCacheManager(num_blocks=num_blocks, block_size=block_size, **options)


class PagedMemory:
    def __init__(self, groups: tuple[KVCacheGroupSpec, ...], cache: KVCacheManager):
        self.groups = groups
        self.num_blocks = cache.num_blocks
        self.block_size = cache.block_size
        self.ids, self.host_ids = cache._pool.ids, cache.host.ids
        # device and host by block id; the null block is never written
        num_slots = cache.block_size + 1
        num_ids = cache.num_blocks + cache.host.num_blocks + 1
        self.blocks = [[0] * num_slots for _ in range(num_ids)]

    def execute(self, copies: CacheCopies, *, swap_out_first: bool) -> None:
        """Swap in and swap out may overlap, so any order of the two must do."""
        assert not {s for s, _ in copies.swap_out} & {d for _, d in copies.swap_in}
        assert not {s for s, _ in copies.swap_in} & {d for _, d in copies.swap_out}
        for source, destination in copies.swap_in:
            assert source > self.num_blocks >= destination > NULL_BLOCK_ID
        for source, destination in copies.swap_out:
            assert destination > self.num_blocks >= source > NULL_BLOCK_ID
        for pairs in (copies.swap_in, copies.swap_out):
            assert len({destination for _, destination in pairs}) == len(pairs)
        first, second = copies.swap_in, copies.swap_out
        if swap_out_first:
            first, second = second, first
        for source, destination in [*first, *second, *copies.copy]:
            assert self._pool(source) == self._pool(destination)
            self.blocks[destination] = self.blocks[source].copy()

    def _pool(self, block_id: int) -> int:
        sizes = (*self.ids.sizes, *self.host_ids.sizes)
        ends = list(itertools.accumulate(sizes))
        return bisect.bisect_left(ends, block_id) % len(self.ids.sizes)

    def _block(self, group: int, table, position: int) -> tuple[list[int], int]:
        """Where a position of a group is, and its slot."""
        index, slot = divmod(position, self.block_size)
        assert table[index] != NULL_BLOCK_ID
        assert table[index] > self.num_blocks or (
            self.ids.pool_of[table[index]] == self.groups[group].pool
        )
        return self.blocks[table[index]], slot

    def record(self, stream: Stream, tokens: list[int], index: int, group: int) -> list[int]:
        """What stands in a full block: its slots, and the state at its start."""
        start = index * self.block_size
        slots = [
            marker(stream, tokens, position, group)
            for position in range(start, min(start + self.block_size, len(tokens)))
        ]
        state = marker(stream, tokens, start - 1, group)
        return slots + [state] * self.groups[group].is_sparse

    def _check_state(self, stream: Stream, table, tokens: list[int], stop: int, group: int) -> None:
        """The state behind `stop` tokens: of the last one's block its start, and rows up to it."""
        if stop:
            block, slot = self._block(group, table, stop - 1)
            expected = self.record(stream, tokens, (stop - 1) // self.block_size, group)
            assert (block[: slot + 1], block[-1]) == (expected[: slot + 1], expected[-1]), (
                f"{stream.sequence_id} group {group} goes on at {stop} from another state"
            )

    def write(self, stream: Stream, tables, tokens: list[int], start: int, stop: int) -> None:
        for group, (spec, table) in enumerate(zip(self.groups, tables, strict=True)):
            if spec.is_sparse:
                self._check_state(stream, table, tokens, start, group)
            for position in range(start, stop):
                if spec.is_sparse and not table[position // self.block_size]:
                    continue
                block, slot = self._block(group, table, position)
                block[slot] = marker(stream, tokens, position, group)
                if spec.is_sparse and not slot:
                    block[-1] = marker(stream, tokens, position - 1, group)

    def read(self, stream: Stream, tables, tokens: list[int], start: int, stop: int) -> None:
        """All that the tokens [start, stop) attend to."""
        for group, (spec, table) in enumerate(zip(self.groups, tables, strict=True)):
            if spec.is_sparse:
                self._check_state(stream, table, tokens, stop, group)
                continue
            first = 0 if spec.reach is None else max(0, start + 1 - spec.reach)
            for position in range(first, stop):
                block, slot = self._block(group, table, position)
                assert block[slot] == marker(stream, tokens, position, group), (
                    f"{stream.sequence_id} group {group} position {position} of [{start}, {stop})"
                )
