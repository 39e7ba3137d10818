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


MAX_VOCAB_SIZE = 1 << 19
"""Sums of 2**43 a token must fit into 63 bits."""


def check_column(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Of this shape, type and place, with its last dimension contiguous.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, device or a strided last dimension.
    """
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, it must be {dtype}; convert it")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, it must be {tuple(shape)}; "
            "allocate it for the bucket's rows and this vocabulary"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the logits are on {device}; move it there")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} along its last dimension, not 1")


def check_logits(logits_RV: torch.Tensor) -> tuple[int, int]:
    """(R, V) of float32 logits with contiguous rows.

    Raises:
        TypeError: not float32.
        ValueError: not two-dimensional, empty vocabulary or one beyond MAX_VOCAB_SIZE.
    """
    if logits_RV.dim() != 2:
        raise ValueError(f"logits have {logits_RV.dim()} dimensions, they must be [rows, vocab]")
    rows, vocab_size = logits_RV.shape
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"the vocabulary is {vocab_size}, it must be in [1, {MAX_VOCAB_SIZE}]; "
            "sample such logits on the host"
        )
    check_column("logits", logits_RV, (rows, vocab_size), torch.float32, logits_RV.device)
    return rows, vocab_size


def check_num_rows(num_rows_1: torch.Tensor, device: torch.device) -> None:
    """int32 [1]: how many of the bucket's rows are real, read on the device.

    Raises: as `check_column`.
    """
    check_column("num_rows", num_rows_1, (1,), torch.int32, device)
