"""Memory of a KV cache is blocks of bytes; what a layer keeps in them is a view of a part of each.

blocks   [B, bytes of a block]
           | layer 0        | layer 1        | ...
           | keys | values  | keys | values  |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

LAYER_ALIGNMENT = 64
"""A layer's part of a block begins at a multiple of so many bytes, a cache line."""


def cached_head_bytes(head_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes of one head's key, or value, of one token in a cache of `kv_dtype`.

    Elements of int8 come with a float32 scale a head and token."""
    return head_size * kv_dtype.itemsize + (4 if kv_dtype is torch.int8 else 0)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a layer keeps in a block: for each slot and head a key and a value.

    Attributes:
        dtype: of elements; see `cached_head_bytes`.
        values_in_keys: a value is the last `value_size` elements of its key.
        index_size: elements of a second key of each token, which an indexer chooses by, behind
            those of the block; 0: there is none. Only with values in keys.
    """

    block_size: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    values_in_keys: bool = False
    index_size: int = 0

    @property
    def index(self) -> KVShape:
        """The shape of what lies behind the block's keys."""
        size = self.index_size
        return KVShape(self.block_size, 1, size, size, self.dtype, values_in_keys=True)

    @property
    def key_bytes(self) -> int:
        """Bytes of a block's keys."""
        return self.block_size * self.num_kv_heads * cached_head_bytes(self.key_size, self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values."""
        if self.values_in_keys:
            return self.key_bytes + (self.index.key_bytes if self.index_size else 0)
        value_bytes = cached_head_bytes(self.value_size, self.dtype)
        return self.key_bytes + self.block_size * self.num_kv_heads * value_bytes

    def split(
        self, blocks_BN: torch.Tensor, stored: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the first bytes of each block [B, N], without copies; where values are
        in the keys those of the indexer, if any.

        Args:
            stored: dtype of the results; None: of the elements.
        """
        keys_BN, values_BN = blocks_BN[:, : self.block_bytes].tensor_split((self.key_bytes,), 1)
        stored = stored or self.dtype
        return keys_BN.view(stored), values_BN.view(stored)


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """One layer's keys and values in blocks, made by `Operations.view_kv_cache`.

    Attributes:
        keys, values: blocks first, the rest in the backend's own layout: [B, S, K, D] (torch), [B,
            K, S, D] (Triton), or panels of 16 tokens (native CPU: keys of float32, both of int8).
            Blocks may lie apart, what is in one does not. Values in keys are columns of these.
        index: the keys of an indexer, as of one head; None: there are none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    shape: KVShape
    index: KVCache | None = None

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, values."""
        return self.keys, self.values


@dataclass(frozen=True, slots=True)
class StateShape:
    """A layer's state of a sequence in a block: tensors side by side, each at a multiple of
    `LAYER_ALIGNMENT`."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def _parts(self) -> Iterator[tuple[int, int, tuple[int, ...], torch.dtype]]:
        """(start, stop) in bytes of each tensor, its shape and dtype."""
        start = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            stop = start + math.prod(shape) * dtype.itemsize
            yield start, stop, shape, dtype
            start = -(-stop // LAYER_ALIGNMENT) * LAYER_ALIGNMENT

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's state."""
        return max((stop for _, stop, *_ in self._parts()), default=0)

    def view(self, blocks_BN: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors [B, *shape] in the first bytes of each block [B, N], without copies."""
        return tuple(
            blocks_BN[:, start:stop].view(dtype).view(len(blocks_BN), *shape)
            for start, stop, shape, dtype in self._parts()
        )


class BlockCopier(Protocol):
    """Moves blocks of a cache, whatever they hold; made by `Operations.make_block_copier`.

    ids: int64 on the CPU, as many sources as destinations, each destination once. Work that is
    queued behind a call sees what it copied; the caller waits for nothing. Raises ValueError: ids
    out of range, or a block twice among destinations.
    """

    @property
    def host_blocks(self) -> torch.Tensor:
        """The second tier, uninitialised: uint8 [blocks, bytes of a block]."""

    def copy(self, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor) -> None:
        """Within the device: all is read before any is written."""

    def swap_in(self, host_ids_N: torch.Tensor, block_ids_N: torch.Tensor) -> None:
        """Copy blocks of host memory to the device."""

    def swap_out(self, block_ids_N: torch.Tensor, host_ids_N: torch.Tensor) -> None:
        """To host memory. The device's blocks may be overwritten by work that is queued behind."""


def check_ids(src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor, num_src: int, num_dst: int) -> None:
    """Raises ValueError: see `BlockCopier`; `num_src`, `num_dst`: blocks that there are."""
    sides = (("source", src_ids_N, num_src), ("destination", dst_ids_N, num_dst))
    for name, ids, number in sides:
        if ids.dim() != 1 or ids.dtype != torch.int64 or ids.device.type != "cpu":
            raise ValueError(
                f"{name} ids are {ids.dtype} {list(ids.shape)} on {ids.device}; make them int64 "
                "[N] on the CPU"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < number:
            raise ValueError(
                f"{name} ids span {int(ids.min())}..{int(ids.max())}, there are blocks "
                f"0..{number - 1}"
            )
    if src_ids_N.shape != dst_ids_N.shape:
        raise ValueError(f"{src_ids_N.numel()} sources, {dst_ids_N.numel()} destinations")
    if len(set(dst_ids_N.tolist())) != dst_ids_N.numel():
        raise ValueError("a block stands twice among destinations; keep the last of its pairs")
