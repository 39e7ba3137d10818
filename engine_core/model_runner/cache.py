"""The memory behind block ids, the copies between blocks, and what a forward pass reads of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine_core.kv_cache import CacheCopies, DiskMoves, PoolIds
from engine_core.kv_cache.copies import BlockPair
from engine_core.kv_cache.host_pool import HashKey
from engine_core.model_runner.config import CacheLayout, DraftConfig, RunnerConfig
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import NoCache, PagedKeys, State
from kernels.interface.kv_cache import KVCache, KVShape
from kernels.interface.operations import (
    AttentionPlanner,
    AttentionSpec,
    ForwardContext,
    Operations,
)

PlanKey = tuple[int, KVShape | None]
"""Group, and shape of its layers' keys; None: they keep states."""
_NO_PLAN: PlanKey = (-1, None)
"""Of layers that keep nothing: any plan says which tokens there are."""


class PagedKVCache:
    """A model's cache and an attention planner for each group of its layers that has keys.

    Args:
        storage: None: a new one.
        draft: the config's, for the cache of that model in the same storage.
    """

    def __init__(
        self,
        config: RunnerConfig,
        storage: BlockStorage | None = None,
        draft: DraftConfig | None = None,
    ) -> None:
        self._ops, spec, first_place = config.ops, config.model.spec, 0
        layout = config.layout
        self.storage = storage or BlockStorage(
            config.ops, layout.pool_bytes, config.block_ids, config.host_block_ids
        )
        if draft is not None:
            self._ops, first_place = draft.ops, len(spec.caches)
            spec = draft.model.spec
        self._planners = dict[PlanKey, AttentionPlanner]()
        self._key_of_layer: list[PlanKey] = []
        self.kv_caches: list[KVCache] = []
        self.states: dict[int, tuple[torch.Tensor, ...]] = {}
        make_planner = partial(self._make_planner, config, spec)
        no_keys = KVShape(config.block_size, 0, 0, 0, config.kv_dtype)
        stage, caches = config.stage, spec.caches
        for place in range(len(caches)) if stage is None else spec.places(stage.layers):
            kept = caches[place]
            if isinstance(kept, NoCache):
                nothing = torch.empty(0)
                self.kv_caches.append(KVCache(nothing, nothing, no_keys))
                self._key_of_layer.append(_NO_PLAN)
                continue
            if isinstance(kept, State):
                blocks_BN, group = self._part(layout, first_place + place)
                views = kept.state_shape(config.block_size).view(blocks_BN)
                self.states[len(self.kv_caches)] = views
                self.kv_caches.append(KVCache(blocks_BN[:, :0], blocks_BN[:, :0], no_keys))
                self._key_of_layer.append((group, None))
                if (group, None) not in self._planners:
                    planner = self._ops.make_state_planner(config.block_size)
                    self._planners[group, None] = planner
                continue
            assert isinstance(kept, PagedKeys), f"blocks of {kept}"
            if kept.shares is not None:
                place = spec.places(range(kept.shares + 1))[-1]
            shape = kept.kv_shape(config.block_size, config.kv_dtype)
            blocks_BN, group = self._part(layout, first_place + place)
            self.kv_caches.append(self._ops.view_kv_cache(blocks_BN, shape))
            self._key_of_layer.append((group, shape))
            if (group, shape) not in self._planners:
                self._planners[group, shape] = make_planner(kept)
        self.last_group = self._key_of_layer[-1][0]
        """KV-cache group of the last layer."""
        self._make_output_planner: Callable[[], AttentionPlanner] | None = None
        if isinstance(kept, PagedKeys):
            self._make_output_planner = partial(make_planner, kept)
        elif isinstance(kept, State):  # its second half reads nothing that it keeps
            self._make_output_planner = partial(self._ops.make_state_planner, config.block_size)

    def _part(self, layout: CacheLayout, place: int) -> tuple[torch.Tensor, int]:
        """The blocks from a layer's part on, and its group."""
        group = layout.group_of(place)
        pool = self.storage.pools[layout.groups[group].spec.pool]
        return pool.device_blocks[:, layout.offsets[place] :], group

    def _make_planner(
        self, config: RunnerConfig, spec: ModelSpec, keys: PagedKeys
    ) -> AttentionPlanner:
        """Make the attention planner of layers that have such keys."""
        encoder = config.encoder
        is_causal = encoder is not None and encoder.family.is_causal_without_window
        return self._ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=keys.num_kv_heads,
                head_size=keys.key_size,
                block_size=config.block_size,
                sliding_window=keys.window,
                max_num_seqs=config.max_num_logits,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                dtype=config.dtype,
                kv_dtype=config.kv_dtype,
                value_size=keys.value_size_in_keys,
                ignores_ends=keys.window is None and is_causal,
            )
        )

    @cached_property
    def output_planner(self) -> AttentionPlanner | None:
        """The planner of the last layer in steps that put out some rows; None: it keeps
        nothing."""
        return None if self._make_output_planner is None else self._make_output_planner()

    def sent(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array on the cache's device; on a CPU the same memory."""
        return torch.from_numpy(array).to(self._ops.device, non_blocking=True)

    def forward_context(
        self,
        *,
        query_start_loc_R1: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_tables_GRM: Sequence[torch.Tensor] | torch.Tensor,
        slot_mappings_GT: Sequence[torch.Tensor] | torch.Tensor,
        num_decodes: int,
        num_decode_tokens: int | None = None,
        num_long_prefills: int | None = None,
        ends_T: torch.Tensor | None = None,
    ) -> ForwardContext:
        """See `AttentionPlanner.plan`; each group has a block table and slots of its own.
        `num_decode_tokens`: None: one for each decode."""
        plans = {
            key: planner.plan(
                query_start_loc_R1=query_start_loc_R1,
                seq_lens_R=seq_lens_R,
                block_table_RM=block_tables_GRM[key[0]],
                slot_mapping_T=slot_mappings_GT[key[0]],
                num_decodes=num_decodes,
                num_decode_tokens=num_decodes if num_decode_tokens is None else num_decode_tokens,
                ends_T=ends_T,
                num_long_prefills=num_long_prefills,
            )
            for key, planner in self._planners.items()
        }
        plans[_NO_PLAN] = next(iter(plans.values()))
        return ForwardContext(
            kv_caches=self.kv_caches,
            metadata=[plans[key] for key in self._key_of_layer],
            ops=self._ops,
            states=self.states,
        )


class DiskStore(Protocol):
    """Blocks beside the runner's memory that outlive the process. Waits for no disk."""

    def load(self, key: HashKey) -> bytes:
        """The contents of a block that a plan loads; once."""

    def save(self, key: HashKey, index: int, contents: bytes) -> None:
        """Keep a block, of this place in its prompt."""


class BlockStorage:
    """Blocks of bytes in a pool for each page size, each with a second tier in host memory. What
    lies where in a block is the layers' matter.

    Args:
        pool_bytes: of a block of each pool.
    """

    def __init__(
        self, ops: Operations, pool_bytes: Sequence[int], ids: PoolIds, host_ids: PoolIds
    ) -> None:
        self._ids, self._host_ids = ids, host_ids
        sizes = zip(ids.sizes, host_ids.sizes, pool_bytes, strict=True)
        self.pools = [PoolStorage(ops, *each) for each in sizes]

    def attach_disk(self, store: DiskStore) -> None:
        """From now on plans may name blocks on disk. For blocks on a CPU."""
        for pool in self.pools:
            pool.disk = store

    def carry_out(self, copies: CacheCopies) -> None:
        """Do what a plan wants copied, in its order."""
        for index, pool in enumerate(self.pools):
            pool.carry_out(self.copies_of(index, copies))

    def copies_of(self, pool: int, copies: CacheCopies) -> CacheCopies:
        """Those of one pool, by the ids of `PoolStorage`."""
        if len(self.pools) == 1:
            return copies
        ids, host_ids, disk = self._ids, self._host_ids, copies.disk
        offset = ids.first_ids[pool] - 1
        host_offset = host_ids.first_ids[pool] - 1 - ids.sizes[pool]

        def is_own(block_id: int) -> bool:
            return (ids if block_id <= ids.num_blocks else host_ids).pool_of[block_id] == pool

        def own(block_id: int) -> int:
            return max(0, block_id - (offset if block_id <= ids.num_blocks else host_offset))

        def own_pairs(pairs: Sequence[BlockPair]) -> list[BlockPair]:
            return [(own(source), own(target)) for source, target in pairs if is_own(source)]

        if disk is not None:
            load = [(key, own(block_id)) for key, block_id in disk.load if is_own(block_id)]
            save = [(key, at, own(block_id)) for key, at, block_id in disk.save if is_own(block_id)]
            disk = DiskMoves(load, save)
        return CacheCopies(
            disk=disk,
            swap_in=own_pairs(copies.swap_in),
            swap_out=own_pairs(copies.swap_out),
            copy=own_pairs(copies.copy),
        )


class PoolStorage:
    """Blocks of one size. Its ids are those that a plan has where there is no other pool:

    id    0      | 1 ........ num_blocks | num_blocks + 1 .... num_blocks + num_host_blocks |
          null   |        device         |                      host                        |
    index 0 ....................num_blocks 0 .............................num_host_blocks - 1
    """

    def __init__(
        self, ops: Operations, num_blocks: int, num_host_blocks: int, block_bytes: int
    ) -> None:
        self._num_blocks = num_blocks
        self.device_blocks = ops.allocate_blocks(num_blocks + 1, block_bytes)  # with the null block
        self.disk: DiskStore | None = None
        self._copier = ops.make_block_copier(self.device_blocks, num_host_blocks)
        self.host_blocks = self._copier.host_blocks

    def _move_to_and_from_disk(self, moves: DiskMoves) -> None:
        assert self.disk is not None, "a plan names blocks on disk, and there is none"
        blocks = self.device_blocks.numpy()
        for key, block_id in moves.load:
            blocks[block_id] = np.frombuffer(self.disk.load(key), np.uint8)
        for key, index, block_id in moves.save:
            self.disk.save(key, index, blocks[block_id].tobytes())

    def carry_out(self, copies: CacheCopies) -> None:
        """See `BlockStorage.carry_out`."""
        if copies.disk is not None:
            self._move_to_and_from_disk(copies.disk)
        first_host = self._num_blocks + 1
        if copies.swap_in:
            self._copier.swap_in(*_ids(copies.swap_in, src_offset=first_host))
        if copies.swap_out:
            self._copier.swap_out(*_ids(copies.swap_out, dst_offset=first_host))
        if copies.copy:
            self._copier.copy(*_ids(copies.copy))


def _ids(
    pairs: Sequence[BlockPair], *, src_offset: int = 0, dst_offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and destinations, each destination once."""
    origins = origin_of_each(pairs)
    src_ids = torch.tensor(list(origins.values()), dtype=torch.int64) - src_offset
    return src_ids, torch.tensor(list(origins), dtype=torch.int64) - dst_offset


def origin_of_each(pairs: Sequence[BlockPair]) -> dict[int, int]:
    """Destination -> the block whose present content it has after all pairs, first to last.

    So the pairs can be carried out at once: read everything, then write everything."""
    origins: dict[int, int] = {}
    for source, destination in pairs:
        origins[destination] = origins.get(source, source)
    return origins
