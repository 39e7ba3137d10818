"""Recurrent layers and gates through the native library; what it does not take goes to torch."""

import ctypes
from typing import Literal

import torch

from kernels.cpu.attention import AttentionGeometry, NativeAttentionPlan, NativeAttentionPlanner
from kernels.cpu.graph_capture import capture_of
from kernels.cpu.library import INT64, POINTER, NativeLibrary, check
from kernels.cpu.recurrent_layers import check_gated, layer_of, norm_of, takes
from kernels.interface.operations import AttentionMetadata, AttentionPlanner
from kernels.interface.recurrence import (
    ConvolutionParams,
    GatedNormParams,
    RecurrenceParams,
    RecurrentCache,
)
from kernels.torch import recurrence as by_torch

_FLOAT32 = torch.float32


class NativeRecurrence:
    """The methods of `Operations` of recurrent layers. Each raises ValueError for a block outside
    the cache, or a table without a block that a request needs; nothing has been written then."""

    def __init__(self, library: NativeLibrary) -> None:
        find = library.function
        self._recur = find("ec_recur", *[POINTER] * 3)
        self._convolve = find("ec_convolve", *[POINTER] * 3)
        self._gated_norm = find("ec_gated_norm", *[POINTER] * 2, *[INT64] * 3, POINTER)
        self._gate = find("ec_gate", POINTER, INT64, POINTER, *[INT64] * 4, POINTER)

    def make_state_planner(self, block_size: int) -> AttentionPlanner:
        return NativeAttentionPlanner(by_torch.state_spec(block_size))

    def convolve(
        self,
        x_TC: torch.Tensor,
        params: ConvolutionParams,
        cache: RecurrentCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        if capture := capture_of(x_TC):
            return capture.convolve(x_TC, params, cache, metadata.plan)
        if not _is_rows(x_TC) or not takes(cache, params.shape.width):
            return by_torch.convolve(x_TC, params, cache, metadata)
        layer, (address, _keeps) = layer_of(cache, params), _geometry(metadata)
        _check_rows("x", x_TC, params.shape.num_channels, metadata)
        layer.qkv, layer.stride = x_TC.data_ptr(), x_TC.stride(0)
        out_TC = torch.empty(x_TC.shape)
        check(self._convolve(address, ctypes.addressof(layer), out_TC.data_ptr()))
        return out_TC

    def recur(
        self,
        qkv_TC: torch.Tensor,
        a_TN: torch.Tensor | None,
        b_TH: torch.Tensor | None,
        params: RecurrenceParams,
        cache: RecurrentCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        if capture := capture_of(qkv_TC):
            return capture.recur(qkv_TC, a_TN, b_TH, params, cache, metadata.plan)
        inputs = [qkv_TC, *(each for each in (a_TN, b_TH) if each is not None)]
        if not all(map(_is_rows, inputs)) or not takes(cache):
            return by_torch.recur(qkv_TC, a_TN, b_TH, params, cache, metadata)
        shape = params.shape
        layer, (address, _keeps) = layer_of(cache, params=params), _geometry(metadata)
        ends = (
            params.starts[0] + shape.num_key_heads * shape.key_size,
            params.starts[1] + shape.num_key_heads * shape.key_size,
            params.starts[2] + shape.num_heads * shape.value_size,
        )
        _check_rows("qkv", qkv_TC, max(ends), metadata)
        layer.qkv, layer.stride = qkv_TC.data_ptr(), qkv_TC.stride(0)
        if params.bias_HD is not None:
            assert a_TN is not None
            _check_rows("a", a_TN, shape.num_heads * shape.decay_size, metadata)
            layer.a, layer.a_stride = a_TN.data_ptr(), a_TN.stride(0)
        if params.rule == "delta":
            assert b_TH is not None
            _check_rows("b", b_TH, shape.num_heads, metadata)
            layer.b, layer.b_stride = b_TH.data_ptr(), b_TH.stride(0)
        out_TN = torch.empty(len(qkv_TC), shape.num_heads * shape.value_size)
        check(self._recur(address, ctypes.addressof(layer), out_TN.data_ptr()))
        return out_TN

    def gated_norm(
        self, x_TN: torch.Tensor, gate_TN: torch.Tensor, params: GatedNormParams
    ) -> torch.Tensor:
        if capture := capture_of(x_TN):
            return capture.gated_norm(x_TN, gate_TN, params)
        if not (_is_rows(x_TN) and _is_rows(gate_TN)) or params.weight_N.dtype is not _FLOAT32:
            return by_torch.gated_norm(x_TN, gate_TN, params)
        check_gated(x_TN.shape[1], gate_TN.shape[1], params)
        call, out_TN = norm_of(params), torch.empty(x_TN.shape)
        call.gate, call.gate_stride = gate_TN.data_ptr(), gate_TN.stride(0)
        address, rows = ctypes.addressof(call), (x_TN.data_ptr(), x_TN.stride(0))
        check(self._gated_norm(address, *rows, *x_TN.shape, out_TN.data_ptr()))
        return out_TN

    def gate(
        self, x_TN: torch.Tensor, gate_TN: torch.Tensor, activation: Literal["sigmoid"] | None
    ) -> torch.Tensor:
        if capture := capture_of(x_TN):
            return capture.gate(x_TN, gate_TN, activation)
        if not (_is_rows(x_TN) and _is_rows(gate_TN)) or x_TN.shape != gate_TN.shape:
            return by_torch.gate(x_TN, gate_TN, activation)
        out_TN = torch.empty(x_TN.shape)
        rows = (x_TN.data_ptr(), x_TN.stride(0), gate_TN.data_ptr(), gate_TN.stride(0))
        check(self._gate(*rows, activation is not None, *x_TN.shape, out_TN.data_ptr()))
        return out_TN


def _is_rows(x_TN: torch.Tensor) -> bool:
    return x_TN.dtype is _FLOAT32 and x_TN.dim() == 2 and (x_TN.stride(1) == 1 or not x_TN.numel())


def _check_rows(name: str, x_TN: torch.Tensor, least: int, metadata: AttentionMetadata) -> None:
    num_tokens = len(metadata.slot_mapping_T) or int(metadata.query_start_loc_R1[-1])
    if x_TN.shape[0] < num_tokens or x_TN.shape[1] < least:
        raise ValueError(
            f"{name} is {tuple(x_TN.shape)}; it must have {num_tokens} rows of at least {least}"
        )


def _geometry(metadata: AttentionMetadata) -> tuple[int, object]:
    """The address of a step's geometry, and what keeps it."""
    if isinstance(metadata.plan, NativeAttentionPlan):
        return metadata.plan.address, metadata.plan
    tensors = [
        each.to(torch.int32).contiguous()
        for each in (metadata.query_start_loc_R1, metadata.seq_lens_R, metadata.block_table_RM)
    ]
    geometry = AttentionGeometry(
        num_requests=tensors[2].shape[0],
        num_tokens=int(tensors[0][-1]),
        table_width=tensors[2].shape[1],
        block_size=metadata.block_size,
        starts=tensors[0].data_ptr(),
        lengths=tensors[1].data_ptr(),
        table=tensors[2].data_ptr(),
    )
    return ctypes.addressof(geometry), (geometry, tensors)
