"""Each request's block tables over one pool. Owns what a request holds and what it may yet need.

Must not know queues, budgets or sampling. In tokens, for allocate_slots(request, 5):

    [0 .. cached) found  [cached .. computed) in the cache  [computed .. computed + 5) to run
    |-------------------- full blocks: findable ---------------------|--- private ---|
"""

import enum
from collections.abc import Iterable, Sequence

from engine_core.kv_cache.block_hashes import extend_block_hashes
from engine_core.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.held_blocks import BlockIds, CachedRequest, HeldBlocks
from engine_core.kv_cache.prefix import CacheHit, find_cached_prefix


class AllocStatus(enum.Enum):
    """May a request be admitted?"""

    OK = enum.auto()
    LATER = enum.auto()
    """Not while the others hold what they hold."""
    NEVER = enum.auto()
    """Not even alone."""


class KVCacheManager:
    """
    Args:
        num_blocks: usable blocks, ids 1..num_blocks. The tensors have one more, for id 0.
        block_size: tokens a block.
        groups: layers that attend alike. All groups take from the same pool.
        enable_prefix_caching: whether requests may reuse each other's full blocks.
        watermark: share of the blocks kept free when a request is admitted beside others.

    Raises:
        ValueError: a number outside its limits.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVCacheGroupSpec] = (KVCacheGroupSpec(),),
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, it must be at least 1")
        if not groups:
            raise ValueError("groups is empty; a model without a KV cache is not supported")
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark is {watermark}, it must be from 0 to below 1")
        self.block_size = block_size
        self.groups = tuple(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark_blocks = int(watermark * num_blocks)
        self._pool = BlockPool(num_blocks=num_blocks, num_groups=len(self.groups))
        self._held: dict[str, HeldBlocks] = {}
        self._sliding = [
            group for group, spec in enumerate(self.groups) if spec.sliding_window is not None
        ]
        self._nothing: BlockIds = tuple([] for _ in self.groups)

    # ------------------------------------------------------------------ numbers

    @property
    def num_blocks(self) -> int:
        """In use + cached + empty."""
        return self._pool.num_blocks

    @property
    def num_blocks_in_use(self) -> int:
        return self._pool.num_in_use

    @property
    def num_blocks_cached(self) -> int:
        """Held by nobody, and findable."""
        return self._pool.num_cached

    @property
    def num_blocks_free(self) -> int:
        """Held by nobody, findable or not."""
        return self._pool.num_free

    def num_peak_blocks(self, request: CachedRequest, max_chunk: int) -> int:
        """Most blocks of all groups that the tokens known now need at once."""
        return sum(
            spec.num_peak_blocks(request.num_tokens, max_chunk, self.block_size)
            for spec in self.groups
        )

    def num_promised_blocks(self, request: CachedRequest, max_chunk: int) -> int:
        """Blocks that an admitted request will still take for the tokens known now."""
        held = self._held[request.request_id]
        return sum(
            max(
                0,
                spec.num_peak_blocks(request.num_tokens, max_chunk, self.block_size)
                - (held.num_blocks - num_dropped),
            )
            for spec, num_dropped in zip(self.groups, held.num_dropped, strict=True)
        )

    def num_common_prefix_blocks(
        self, request: CachedRequest | None, num_holders: int
    ) -> list[int]:
        """For each group, leading blocks of `request` that all `num_holders` requests that hold
        blocks share. 0 for fewer than two of them, and in sliding groups once blocks dropped."""
        counts = [0] * len(self.groups)
        if request is None or num_holders < 2:
            return counts
        for group, table in enumerate(self._held[request.request_id].tables):
            for block_id in table:
                # the null block has no references, so a sliding group stops there
                if self._pool.ref_count(block_id) != num_holders:
                    break
                counts[group] += 1
        return counts

    # ------------------------------------------------------------------ admission

    def find_cached_prefix(self, request: CachedRequest) -> CacheHit:
        """What of the request's tokens is in the cache, in whole blocks, and never all of them:
        the last token must be computed to choose the next one. Changes nothing but the hashes."""
        num_reusable = (request.num_tokens - 1) // self.block_size
        if not self.enable_prefix_caching or num_reusable == 0:
            return CacheHit(0, tuple([] for _ in self.groups))
        self._extend_hashes(request, num_reusable)
        return find_cached_prefix(
            self._pool, self.groups, request.block_hashes[:num_reusable], self.block_size
        )

    def can_admit(
        self, request: CachedRequest, hit: CacheHit, *, max_chunk: int, num_promised: int | None
    ) -> AllocStatus:
        """Whether all tokens known now have room, not only the first chunk's: otherwise a prompt
        would be admitted only to be preempted.

        Args:
            max_chunk: most tokens of a request in a step.
            num_promised: blocks that running requests will still take; None if none runs, so
                that no head-room is needed.
        """
        num_required = self.num_peak_blocks(request, max_chunk)
        if num_required > self.num_blocks:
            return AllocStatus.NEVER
        for spec, block_ids in zip(self.groups, hit.block_ids, strict=True):
            # a sliding group's found blocks leave it again, and new ones come in their place
            if spec.sliding_window is None:
                num_required -= sum(self._pool.ref_count(block_id) > 0 for block_id in block_ids)
        if num_promised is not None:
            num_required += num_promised + self.watermark_blocks
        return AllocStatus.OK if num_required <= self._pool.num_free else AllocStatus.LATER

    def adopt(self, request: CachedRequest, hit: CacheHit) -> None:
        """Start the request's tables with what was found."""
        assert request.request_id not in self._held, f"{request.request_id!r} holds blocks already"
        for block_ids in hit.block_ids:
            self._pool.share(block_id for block_id in block_ids if block_id != NULL_BLOCK_ID)
        self._held[request.request_id] = HeldBlocks.starting_with(hit.block_ids)

    # ------------------------------------------------------------------ a step

    def allocate_slots(self, request: CachedRequest, num_tokens: int) -> BlockIds | None:
        """Room for tokens [num_computed, num_computed + num_tokens) of a request.

        Full blocks become findable now, before they are computed, so that requests of one step
        share them; tokens beyond `request.num_tokens` are drafts and never make a block findable.

        Returns:
            The new blocks of each group (not to be changed), or None if too few are free: nothing
            was taken then.
        """
        held = self._held.get(request.request_id) or HeldBlocks.starting_with(self._nothing)
        stop = request.num_computed_tokens + num_tokens
        num_new = -(-stop // self.block_size) - held.num_blocks
        new_blocks = self._nothing
        if num_new > 0:
            self._drop_out_of_window(request.num_computed_tokens, held)
            if num_new * len(self.groups) > self._pool.num_free:
                return None
            new_blocks = tuple(self._pool.allocate(num_new) for _ in self.groups)
            for table, block_ids in zip(held.tables, new_blocks, strict=True):
                table.extend(block_ids)
            held.num_blocks += num_new
            self._held[request.request_id] = held
        num_full = min(stop, request.num_tokens) // self.block_size
        if num_full > held.num_findable and self.enable_prefix_caching:
            self._make_findable(request, held, num_full)
        return new_blocks

    def _drop_out_of_window(self, position: int, held: HeldBlocks) -> None:
        for group in self._sliding:
            num_dropped = self.groups[group].num_dropped_blocks(position, self.block_size)
            self._pool.release(held.drop(group, num_dropped))

    def _make_findable(self, request: CachedRequest, held: HeldBlocks, num_full: int) -> None:
        self._extend_hashes(request, num_full)
        for group, table in enumerate(held.tables):
            for index in range(held.num_findable, num_full):
                if table[index] != NULL_BLOCK_ID:
                    self._pool.register(table[index], group, request.block_hashes[index])
        held.num_findable = num_full

    def _extend_hashes(self, request: CachedRequest, num_full_blocks: int) -> None:
        extend_block_hashes(
            request.block_hashes,
            request.all_token_ids,
            num_full_blocks,
            self.block_size,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
        )

    def block_ids(self, request: CachedRequest) -> BlockIds:
        """A copy of the request's whole tables."""
        return tuple(list(table) for table in self._held[request.request_id].tables)

    # ------------------------------------------------------------------ giving back

    def free(self, request: CachedRequest) -> None:
        """Give back all that the request holds, if anything; the tail is evicted before the head,
        because a head is of use to more requests."""
        held = self._held.pop(request.request_id, None)
        if held is not None:
            self._pool.release(held.tail_first())

    def forget(self, request: CachedRequest, first_token: int = 0) -> None:
        """Nobody may find what the request's blocks hold from `first_token` on: it was not
        computed, or is not to be trusted."""
        held = self._held.get(request.request_id)
        if held is None:
            return
        for table in held.tables:
            self._pool.forget(
                block_id
                for block_id in table[first_token // self.block_size :]
                if block_id != NULL_BLOCK_ID
            )

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds. Returns how many."""
        return self._pool.forget_cached()

    # ------------------------------------------------------------------ invariants

    def check(self, requests: Iterable[CachedRequest] = ()) -> None:
        """Assert that references are exactly those of the tables, and that the tables of these
        requests cover their computed tokens."""
        self._pool.check()
        ref_counts = [0] * (self.num_blocks + 1)
        for held in self._held.values():
            for table, num_dropped in zip(held.tables, held.num_dropped, strict=True):
                assert len(table) == held.num_blocks
                assert not any(table[:num_dropped])
                assert all(table[num_dropped:])
                for block_id in table[num_dropped:]:
                    ref_counts[block_id] += 1
        for block_id in range(1, self.num_blocks + 1):
            assert self._pool.ref_count(block_id) == ref_counts[block_id]
        for request in requests:
            held = self._held[request.request_id]
            assert held.num_blocks * self.block_size >= request.num_computed_tokens
