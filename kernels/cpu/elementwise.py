"""Norms, gated activations, rotation with the cache write, and embedding of the native library."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.kv_cache import format_of_cache, head_size_of
from kernels.cpu.library import NativeLibrary, check
from kernels.interface.operations import KVCache, RotaryParams

_POINTER, _INT, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

_SILU, _GELU_TANH = 0, 1


class Rotary(ctypes.Structure):
    """Mirrors `Rotary` of src/rope.h."""

    _fields_ = (
        ("qkv", _POINTER),
        ("cos_sin", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("q_weight", _POINTER),
        ("k_weight", _POINTER),
        ("num_tokens", _INT64),
        ("qkv_stride", _INT64),
        ("num_positions", _INT64),
        ("num_slots", _INT64),
        ("num_query_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_size", _INT64),
        ("half", _INT64),
        ("kv_format", _INT64),
        ("eps", _FLOAT),
    )


class NativeElementwise:
    """One thread uses an instance at a time.

    Every method raises ValueError for a tensor of another dtype, shape or layout than it says, and
    for an index out of range; nothing has been written then.
    """

    def __init__(self, library: NativeLibrary) -> None:
        find = library.function
        self._rms_norm = find(
            "ec_rms_norm", _POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64, _FLOAT
        )
        self._add_rms_norm = find(
            "ec_add_rms_norm", _POINTER, _POINTER, _POINTER, _INT64, _INT64, _FLOAT
        )
        self._gated = find("ec_gated_activation", _POINTER, _POINTER, _INT64, _INT64, _INT)
        self._rotary_and_cache = find("ec_rotary_and_cache", _POINTER)
        self._embedding = find("ec_embedding", _POINTER, _INT64, _POINTER, _INT64, _INT64, _POINTER)
        self._rotary = Rotary()
        self._rotary_address = ctypes.addressof(self._rotary)

    def rms_norm(self, x: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operations.rms_norm`."""
        size = _norm_size(x, weight_E)
        stride = size
        if not x.is_contiguous():
            if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= size:
                stride = x.stride(0)
            else:
                x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        check(
            self._rms_norm(
                x.data_ptr(),
                stride,
                weight_E.data_ptr(),
                out.data_ptr(),
                x.numel() // size,
                size,
                eps,
            )
        )
        return out

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operations.add_rms_norm`; the results are in the memory of the arguments."""
        size = _norm_size(x_TE, weight_E)
        _check("residual", residual_TE, x_TE.shape)
        _check("x", x_TE, x_TE.shape)
        refusal = self._add_rms_norm(
            x_TE.data_ptr(),
            residual_TE.data_ptr(),
            weight_E.data_ptr(),
            x_TE.numel() // size,
            size,
            eps,
        )
        if refusal is not None:
            check(refusal)
        return x_TE, residual_TE

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """See `Operations.silu_and_mul`."""
        return self._gated_activation(gate_up_TF2, _SILU)

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """See `Operations.gelu_tanh_and_mul`."""
        return self._gated_activation(gate_up_TF2, _GELU_TANH)

    def _gated_activation(self, gate_up_TF2: torch.Tensor, kind: int) -> torch.Tensor:
        shape = gate_up_TF2.shape
        if shape[-1] % 2:
            raise ValueError(f"gate_up is {tuple(shape)}; its last dimension is twice the result's")
        _check("gate_up", gate_up_TF2, shape)
        size = shape[-1] // 2
        out = torch.empty((*shape[:-1], size), dtype=torch.float32)
        num_rows = out.numel() // size if size else 0
        check(self._gated(gate_up_TF2.data_ptr(), out.data_ptr(), num_rows, size, kind))
        return out

    def embedding(self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        """See `Operations.embedding`."""
        num_rows, size = weight_VE.shape
        _check("weight", weight_VE, (num_rows, size))
        _check("token_ids", token_ids_T, token_ids_T.shape, torch.int64)
        out = torch.empty((*token_ids_T.shape, size), dtype=torch.float32)
        check(
            self._embedding(
                token_ids_T.data_ptr(),
                token_ids_T.numel(),
                weight_VE.data_ptr(),
                num_rows,
                size,
                out.data_ptr(),
            )
        )
        return out

    def rotary_and_cache(
        self,
        qkv_TN: torch.Tensor,
        positions_T: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache,
        params: RotaryParams,
    ) -> torch.Tensor:
        """See `Operations.rotary_and_cache`; q_THD is a view of `qkv_TN`."""
        num_tokens, width = qkv_TN.shape
        keys, values = kv_cache
        num_heads = params.num_query_heads + 2 * keys.shape[2]
        head_size = params.head_size
        if head_size_of(keys) != head_size or width != num_heads * head_size:
            raise ValueError(
                f"qkv is {tuple(qkv_TN.shape)}; {params.num_query_heads} heads of q and twice the "
                f"{keys.shape[2]} of the cache {tuple(keys.shape)}, each of {head_size}, "
                f"are {num_heads * head_size} columns"
            )
        _check("qkv", qkv_TN, (num_tokens, width))
        if format_of_cache(keys) is None:
            raise ValueError(f"keys are {keys.dtype}: no format of the cache that is known")
        _check("keys", keys, keys.shape, keys.dtype)
        _check("values", values, keys.shape, keys.dtype)
        _check("cos_sin", params.cos_sin_PD, params.cos_sin_PD.shape)
        _check("positions", positions_T, (num_tokens,), torch.int64)
        _check("slot_mapping", slot_mapping_T, (num_tokens,), torch.int64)
        call = self._rotary
        fill_rotary(call, kv_cache, params)
        call.qkv = qkv_TN.data_ptr()
        call.positions = positions_T.data_ptr()
        call.slots = slot_mapping_T.data_ptr()
        call.num_tokens = num_tokens
        call.qkv_stride = width
        refusal = self._rotary_and_cache(self._rotary_address)
        if refusal is not None:
            check(refusal)
        shape = (num_tokens, params.num_query_heads, head_size)
        return qkv_TN.as_strided(shape, (width, head_size, 1))


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


def _check(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> None:
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; it "
            f"must be contiguous {dtype} of {tuple(shape)}"
        )


def _norm_size(x: torch.Tensor, weight_E: torch.Tensor) -> int:
    size = x.shape[-1]
    _check("weight", weight_E, (size,))
    if x.dtype is not torch.float32 or not size:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; it must be float32 with rows of 1 up")
    return size


def _head_weight(name: str, weight_D: torch.Tensor | None, head_size: int) -> int | None:
    if weight_D is None:
        return None
    _check(name, weight_D, (head_size,))
    return weight_D.data_ptr()
