"""Copies of whole KV blocks, on the device and between it and a second tier in host memory."""

from typing import Protocol

import torch


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
