"""What the native library's rotation with the cache write is given, and the check of tensors."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.kv_cache import format_of_cache
from kernels.cpu.library import FLOAT, INT64, POINTER, members
from kernels.interface.operations import KVCache, RotaryParams


class Rotary(ctypes.Structure):
    """Mirrors `Rotary` of src/rope.h."""

    _fields_ = [
        *members(POINTER, "qkv", "cos_sin", "positions", "slots", "k_cache", "v_cache"),
        *members(POINTER, "q_weight", "k_weight"),
        *members(INT64, "num_tokens", "qkv_stride", "num_positions", "num_slots"),
        *members(INT64, "num_query_heads", "num_kv_heads", "head_size", "half", "kv_format"),
        ("eps", FLOAT),
    ]


def fill_rotary(call: Rotary, kv_cache: KVCache, params: RotaryParams) -> None:
    """The fields of `call` that are a layer's; those of a step are left.

    Raises:
        ValueError: a weight of another shape, dtype or layout.
    """
    keys, values = kv_cache
    num_blocks, block_size, num_kv_heads, _ = keys.shape
    head_size, cos_sin_PD = params.head_size, params.cos_sin_PD
    call.cos_sin = cos_sin_PD.data_ptr()
    call.k_cache = keys.data_ptr()
    call.v_cache = values.data_ptr()
    call.q_weight = _head_weight("q_norm_weight", params.q_norm_weight_D, head_size)
    call.k_weight = _head_weight("k_norm_weight", params.k_norm_weight_D, head_size)
    call.num_positions = cos_sin_PD.shape[0]
    call.num_slots = num_blocks * block_size
    call.num_query_heads = params.num_query_heads
    call.num_kv_heads = num_kv_heads
    call.head_size = head_size
    call.half = cos_sin_PD.shape[1] // 2
    call.kv_format = format_of_cache(keys)
    call.eps = params.norm_eps


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> None:
    """
    Raises:
        ValueError: another dtype or shape, or gaps.
    """
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; it "
            f"must be contiguous {dtype} of {tuple(shape)}"
        )


def _head_weight(name: str, weight_D: torch.Tensor | None, head_size: int) -> int | None:
    if weight_D is None:
        return None
    check_tensor(name, weight_D, (head_size,))
    return weight_D.data_ptr()
