"""The memory behind block ids, the copies between blocks, and what a forward pass reads of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from engine_core.kv_cache import CacheCopies, DiskMoves
from engine_core.kv_cache.copies import BlockPair
from engine_core.kv_cache.host_pool import HashKey
from engine_core.model_runner.config import DraftConfig, RunnerConfig
from kernels.interface.given_rows import GivenRows
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionPlanner,
    AttentionSpec,
    ForwardContext,
    KVCache,
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
        spec, layout, first_layer = config.model.kv_cache_spec, config.layout, 0
        self._ops = config.ops
        self.storage = storage or BlockStorage(config)
        if draft is not None:
            self._ops, first_layer = draft.ops, spec.num_layers
            spec = draft.model.kv_cache_spec
        self._attention_specs = [
            AttentionSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                block_size=config.block_size,
                sliding_window=group.sliding_window,
                max_num_seqs=config.max_num_logits,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                dtype=config.dtype,
                kv_dtype=config.kv_dtype,
            )
            for group in layout.groups
        ]
        self._planners = [self._ops.make_attention_planner(s) for s in self._attention_specs]
        layers = range(first_layer, first_layer + spec.num_layers)
        if config.stage is not None:
            layers = config.stage.layers
        places = [layout.place_of(layer) for layer in layers]
        self._group_of_layer = [group for group, _ in places]
        self.last_group = self._group_of_layer[-1]
        """That of the last layer."""
        self.kv_caches = [self.storage.device_tensors[tensor] for _, tensor in places]

    @cached_property
    def output_planner(self) -> AttentionPlanner:
        """Of the last layer's attention in steps that put out some rows."""
        return self._ops.make_attention_planner(self._attention_specs[self.last_group])

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
        given: GivenRows | None = None,
        positions_AT: torch.Tensor | None = None,
        ends_T: torch.Tensor | None = None,
    ) -> ForwardContext:
        """See `AttentionPlanner.plan`; each group has a block table and slots of its own.
        `num_decode_tokens`: None: one for each decode."""
        by_group: list[AttentionMetadata] = [
            planner.plan(
                query_start_loc_R1=query_start_loc_R1,
                seq_lens_R=seq_lens_R,
                block_table_RM=block_tables_GRM[group],
                slot_mapping_T=slot_mappings_GT[group],
                num_decodes=num_decodes,
                num_decode_tokens=num_decodes if num_decode_tokens is None else num_decode_tokens,
                ends_T=ends_T,
                num_long_prefills=num_long_prefills,
            )
            for group, planner in enumerate(self._planners)
        ]
        return ForwardContext(
            kv_caches=self.kv_caches,
            metadata=[by_group[group] for group in self._group_of_layer],
            ops=self._ops,
            given=given,
            positions_AT=positions_AT,
        )


class DiskStore(Protocol):
    """Blocks beside the runner's memory that outlive the process. Waits for no disk."""

    def load(self, key: HashKey) -> bytes:
        """The contents of a block that a plan loads; once."""

    def save(self, key: HashKey, index: int, contents: bytes) -> None:
        """Keep a block, of this place in its prompt."""


class BlockStorage:
    """Cache tensors on the device, and a second tier in host memory.

        id    0      | 1 ........ num_blocks | num_blocks + 1 .... num_blocks + num_host_blocks |
              null   |        device         |                      host                        |
        index 0 ....................num_blocks 0 .............................num_host_blocks - 1

    One id addresses its block in every tensor of its tier, so a pair is copied in all of them."""

    def __init__(self, config: RunnerConfig) -> None:
        self._num_blocks = config.num_blocks
        self.device_tensors: list[KVCache] = [
            config.ops.allocate_kv_cache(
                config.num_blocks + 1,  # with the null block
                config.block_size,
                spec.num_kv_heads,
                spec.head_size,
                config.kv_dtype,
            )
            for spec in config.tensor_specs
        ]
        self._disk: DiskStore | None = None
        self._bytes: list[np.ndarray] = []
        """The device's tensors as bytes, a row a block."""
        self._copier = config.ops.make_block_copier(self.device_tensors, config.num_host_blocks)
        self.host_tensors = self._copier.host_caches

    def attach_disk(self, store: DiskStore) -> None:
        """From now on plans may name blocks on disk. For tensors on a CPU."""
        self._disk = store
        self._bytes = [
            tensor.view(tensor.shape[0], -1).view(torch.uint8).numpy()
            for pair in self.device_tensors
            for tensor in pair
        ]

    def _move_to_and_from_disk(self, moves: DiskMoves) -> None:
        assert self._disk is not None, "a plan names blocks on disk, and there is none"
        for key, block_id in moves.load:
            self._write_block(block_id, self._disk.load(key))
        for key, index, block_id in moves.save:
            contents = np.concatenate([rows[block_id] for rows in self._bytes]).tobytes()
            self._disk.save(key, index, contents)

    def _write_block(self, block_id: int, contents: bytes) -> None:
        start = 0
        for rows in self._bytes:
            row = rows[block_id]
            row[:] = np.frombuffer(contents, np.uint8, len(row), start)
            start += len(row)

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
