"""Refusals of tensors that a kernel cannot take. Reads attributes only, never a tensor's data."""

from collections.abc import Sequence

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""The types that models compute in."""

MAX_VOCAB_SIZE = 1 << 19
"""Sums of 2**43 a token must fit into 63 bits."""


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
    *,
    contiguous_dims: int | None = None,
) -> None:
    """
    Args:
        dtypes: any of them is right.
        contiguous_dims: how many of the last dimensions must be contiguous; None: all.

    Raises:
        ValueError: the tensor is not that.
    """
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
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


def check_memory(memory_RS: torch.Tensor, rows: int, splits: int) -> None:
    """Raises ValueError: memory for fewer rows of logits, or for another vocabulary."""
    if memory_RS.shape[0] < rows or memory_RS.shape[1] != splits:
        raise ValueError(
            f"the memory is for {tuple(memory_RS.shape)} rows and splits, these logits need "
            f"{(rows, splits)}; allocate it for the largest bucket and this vocabulary"
        )


def check_logits(logits_RV: torch.Tensor, num_rows_1: torch.Tensor) -> tuple[int, int]:
    """(R, V) of floating logits with contiguous rows.
    `num_rows_1`: int32, how many of the bucket's rows are real; read on the device. Raises
    ValueError: not that, an empty vocabulary or one beyond MAX_VOCAB_SIZE."""
    if logits_RV.dim() != 2:
        raise ValueError(f"logits have {logits_RV.dim()} dimensions, they must be [rows, vocab]")
    rows, vocab_size = logits_RV.shape
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"the vocabulary is {vocab_size}, it must be in [1, {MAX_VOCAB_SIZE}]; "
            "sample such logits on the host"
        )
    device = logits_RV.device
    check_tensor("logits", logits_RV, logits_RV.shape, FLOATS, device, contiguous_dims=1)
    check_tensor("num_rows", num_rows_1, (1,), torch.int32, device)
    return rows, vocab_size
