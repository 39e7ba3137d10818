"""The memory behind block ids, the copies between blocks, and what a forward pass reads of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch

from engine_core.kv_cache import CacheCopies, DiskMoves
from engine_core.kv_cache.copies import BlockPair
from engine_core.kv_cache.host_pool import HashKey
from engine_core.model_runner.config import DraftConfig, RunnerConfig
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import PagedKeys
from kernels.interface.kv_cache import KVCache, KVShape
from kernels.interface.operations import (
    AttentionPlanner,
    AttentionSpec,
    ForwardContext,
)


class PagedKVCache:
    """A model's cache and an attention planner for each group of its layers.

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
        self._ops, spec, first_layer = config.ops, config.model.spec, 0
        self.storage = storage or BlockStorage(config)
        if draft is not None:
            self._ops, first_layer = draft.ops, spec.num_layers
            spec = draft.model.spec
        layout, self._planners = config.layout, dict[tuple[int, KVShape], AttentionPlanner]()
        self._planner_of_layer: list[tuple[int, KVShape]] = []
        self.kv_caches: list[KVCache] = []
        for layer in range(spec.num_layers) if config.stage is None else config.stage.layers:
            keys = spec.keys_of(layer)
            place = first_layer + (layer if keys.shares is None else keys.shares)
            shape = keys.kv_shape(config.block_size, config.kv_dtype)
            blocks_BN = self.storage.device_blocks[:, layout.offsets[place] :]
            self.kv_caches.append(self._ops.view_kv_cache(blocks_BN, shape))
            key = layout.group_of(place), shape
            self._planner_of_layer.append(key)
            if key not in self._planners:
                self._planners[key] = self._make_planner(config, spec, keys)
        self.last_group = self._planner_of_layer[-1][0]
        """KV-cache group of the last layer."""
        self._make_output_planner = partial(self._make_planner, config, spec, keys)

    def _make_planner(
        self, config: RunnerConfig, spec: ModelSpec, keys: PagedKeys
    ) -> AttentionPlanner:
        """Make the attention planner of layers that have such keys."""
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
            )
        )

    @cached_property
    def output_planner(self) -> AttentionPlanner:
        """The planner of the last layer's attention in steps that put out some rows."""
        return self._make_output_planner()

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
        return ForwardContext(
            kv_caches=self.kv_caches,
            metadata=[plans[key] for key in self._planner_of_layer],
            ops=self._ops,
        )


class DiskStore(Protocol):
    """Blocks beside the runner's memory that outlive the process. Waits for no disk."""

    def load(self, key: HashKey) -> bytes:
        """The contents of a block that a plan loads; once."""

    def save(self, key: HashKey, index: int, contents: bytes) -> None:
        """Keep a block, of this place in its prompt."""


class BlockStorage:
    """Blocks of bytes on the device, and a second tier in host memory. What lies where in a block
    is the layers' matter.

        id    0      | 1 ........ num_blocks | num_blocks + 1 .... num_blocks + num_host_blocks |
              null   |        device         |                      host                        |
        index 0 ....................num_blocks 0 .............................num_host_blocks - 1
    """

    def __init__(self, config: RunnerConfig) -> None:
        self._num_blocks = config.num_blocks
        self.device_blocks = config.ops.allocate_blocks(
            config.num_blocks + 1,  # with the null block
            config.block_bytes,
        )
        self._disk: DiskStore | None = None
        self._copier = config.ops.make_block_copier(self.device_blocks, config.num_host_blocks)
        self.host_blocks = self._copier.host_blocks

    def attach_disk(self, store: DiskStore) -> None:
        """From now on plans may name blocks on disk. For blocks on a CPU."""
        self._disk = store

    def _move_to_and_from_disk(self, moves: DiskMoves) -> None:
        assert self._disk is not None, "a plan names blocks on disk, and there is none"
        blocks = self.device_blocks.numpy()
        for key, block_id in moves.load:
            blocks[block_id] = np.frombuffer(self._disk.load(key), np.uint8)
        for key, index, block_id in moves.save:
            self._disk.save(key, index, blocks[block_id].tobytes())

    def carry_out(self, copies: CacheCopies) -> None:
        """Do what a plan wants copied, in its order."""
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
