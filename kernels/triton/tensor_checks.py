"""Refusals of tensors that a kernel cannot take.

Reads attributes only, never a tensor's data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    contiguous_dims: int | None = None,
) -> None:
    """
    Args:
        dtypes: any of them is right.
        contiguous_dims: how many of the last dimensions must lie densely; None: all.

    Raises:
        ValueError: the tensor is not that.
    """
    inner = tensor.dim() if contiguous_dims is None else contiguous_dims
    fits = tuple(tensor.shape) == tuple(shape) and tensor.dtype in dtypes
    if fits and tensor.device == device and _is_dense(tensor, inner):
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(
        f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with strides "
        f"{list(tensor.stride())} on {tensor.device}; make it {wanted} {list(shape)} on {device}, "
        f"its last {inner} dimensions contiguous"
    )


def _is_dense(tensor: torch.Tensor, inner: int) -> bool:
    expected = 1
    for axis in range(tensor.dim() - 1, tensor.dim() - 1 - inner, -1):
        if tensor.shape[axis] > 1 and tensor.stride(axis) != expected:
            return False
        expected *= tensor.shape[axis]
    return True
