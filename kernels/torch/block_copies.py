"""Whole blocks of a KV cache copied within it, or between device and host memory."""

import torch

from kernels.interface.operations import KVCache


def copy_blocks(
    src: KVCache, dst: KVCache, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
) -> None:
    """See `Operations.copy_blocks`. Gathers on the source's side, so that one piece travels."""
    for source, destination in zip(src, dst, strict=True):
        gathered_NSKD = source.index_select(0, src_ids_N.to(source.device))
        destination.index_copy_(
            0, dst_ids_N.to(destination.device), gathered_NSKD.to(destination.device)
        )
