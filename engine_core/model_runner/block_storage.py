"""The memory behind block ids: cache tensors on the device, a second tier in host memory, and the
copies between blocks.

    id    0      | 1 ........ num_blocks | num_blocks + 1 .... num_blocks + num_host_blocks |
          null   |        device         |                      host                        |
    index 0 ....................num_blocks 0 .............................num_host_blocks - 1

One id addresses its block in every tensor of its tier, so a pair is copied in all of them. Must
not know sequences, or why a block is copied.
"""

from collections.abc import Sequence

import torch

from engine_core.kv_cache import CacheCopies
from engine_core.kv_cache.copies import BlockPair
from kernels.interface.operations import KVCache, Operations


class BlockStorage:
    """
    Args:
        ops: allocates the tensors of both tiers and copies.
        num_tensors: cache tensors, each a pair of keys and values.
        num_blocks: usable device blocks; one more is allocated for the null block, id 0.
        num_host_blocks: blocks in host memory; 0 for none.
    """

    def __init__(
        self,
        *,
        ops: Operations,
        num_tensors: int,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._ops = ops
        self._num_blocks = num_blocks
        self.device_tensors: list[KVCache] = [
            ops.allocate_kv_cache(num_blocks + 1, block_size, num_kv_heads, head_size, dtype)
            for _ in range(num_tensors)
        ]
        self.host_tensors: list[KVCache] = []
        if num_host_blocks:
            self.host_tensors = [
                ops.allocate_host_kv_cache(like, num_host_blocks) for like in self.device_tensors
            ]

    def carry_out(self, copies: CacheCopies) -> None:
        """Do what a plan wants copied, in its order."""
        device, host = self.device_tensors, self.host_tensors
        first_host = self._num_blocks + 1
        self._copy(host, device, copies.swap_in, src_offset=first_host)
        self._copy(device, host, copies.swap_out, dst_offset=first_host)
        self._copy(device, device, copies.copy)

    def _copy(
        self,
        src_tensors: Sequence[KVCache],
        dst_tensors: Sequence[KVCache],
        pairs: Sequence[BlockPair],
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
    ) -> None:
        if not pairs:
            return
        origins = origin_of_each(pairs)
        src_ids = torch.tensor(list(origins.values()), dtype=torch.int64) - src_offset
        dst_ids = torch.tensor(list(origins), dtype=torch.int64) - dst_offset
        for src, dst in zip(src_tensors, dst_tensors, strict=True):
            self._ops.copy_blocks(src, dst, src_ids, dst_ids)


def origin_of_each(pairs: Sequence[BlockPair]) -> dict[int, int]:
    """Destination -> the block whose present content it has after all pairs, first to last.

    So the pairs can be carried out at once: read everything, then write everything.
    """
    origins: dict[int, int] = {}
    for source, destination in pairs:
        origins[destination] = origins.get(source, source)
    return origins
