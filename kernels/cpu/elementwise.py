"""Norms, activations and the mean of rows through the native library."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.graph_capture import capture_of
from kernels.cpu.graph_ops import ACTIVATIONS, GraphOpKind
from kernels.cpu.library import FLOAT, INT, INT64, POINTER, NativeLibrary, check
from kernels.cpu.tensor_checks import check_tensor
from kernels.interface.operations import LEAST_LENGTH, Activation
from kernels.torch import elementwise as by_torch

_FLOAT32 = torch.float32
_GATED = (GraphOpKind.SILU, GraphOpKind.GELU_TANH, GraphOpKind.GELU)
"""Activations in the order of ec_gated_activation's numbers."""

Normed = tuple[torch.Tensor, torch.Tensor]


class NativeElementwise:
    """The methods of `Operations` that go row by row; what the library does not take goes to torch.
    Each raises ValueError for a tensor of another shape than it says."""

    def __init__(self, library: NativeLibrary) -> None:
        find = library.function
        norm = POINTER, INT64, *[POINTER] * 2, *[INT64] * 2, FLOAT
        add_norm = *[POINTER] * 3, *[INT64] * 2, FLOAT
        self._norms = {
            GraphOpKind.RMS_NORM: find("ec_rms_norm", *norm),
            GraphOpKind.LAYER_NORM: find("ec_layer_norm", *norm),
            GraphOpKind.ADD_RMS_NORM: find("ec_add_rms_norm", *add_norm),
            GraphOpKind.ADD_LAYER_NORM: find("ec_add_layer_norm", *add_norm),
        }
        self._mean_direction = find("ec_mean_direction", POINTER, *[INT64] * 3, FLOAT, POINTER)
        self._gated = find("ec_gated_activation", *[POINTER] * 2, *[INT64] * 2, INT)
        self._activation = find("ec_activation", POINTER, *[INT64] * 2, INT)
        self._direction = np.empty(0, np.float32)
        self._direction_address = 0

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(GraphOpKind.RMS_NORM, by_torch.rms_norm, x_TE, weight_E, eps)

    def layer_norm(self, x_TE: torch.Tensor, weight_2E: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(GraphOpKind.LAYER_NORM, by_torch.layer_norm, x_TE, weight_2E, eps)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> Normed:
        add, kind = by_torch.add_rms_norm, GraphOpKind.ADD_RMS_NORM
        return self._add_norm(kind, add, x_TE, residual_TE, weight_E, eps)

    def add_layer_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_2E: torch.Tensor, eps: float
    ) -> Normed:
        add, kind = by_torch.add_layer_norm, GraphOpKind.ADD_LAYER_NORM
        return self._add_norm(kind, add, x_TE, residual_TE, weight_2E, eps)

    def _norm(
        self,
        kind: GraphOpKind,
        other: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
        x_TE: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        if capture := capture_of(x_TE):
            return capture.norm(kind, x_TE, weight, eps)
        if x_TE.dtype is not _FLOAT32 or weight.dtype is not _FLOAT32:
            return other(x_TE, weight, eps)
        size = stride = _norm_size(x_TE, weight)
        if not x_TE.is_contiguous():
            if x_TE.dim() == 2 and x_TE.stride(1) == 1 and x_TE.stride(0) >= size:
                stride = x_TE.stride(0)
            else:
                x_TE = x_TE.contiguous()
        out = torch.empty(x_TE.shape, dtype=_FLOAT32)
        x, num_rows = x_TE.data_ptr(), x_TE.numel() // size
        run = self._norms[kind]
        check(run(x, stride, weight.data_ptr(), out.data_ptr(), num_rows, size, eps))
        return out

    def _add_norm(
        self,
        kind: GraphOpKind,
        other: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Normed],
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> Normed:
        if capture := capture_of(x_TE):
            return capture.add_norm(kind, x_TE, residual_TE, weight, eps)
        if (
            x_TE.dtype is not _FLOAT32
            or weight.dtype is not _FLOAT32
            or x_TE.data_ptr() == residual_TE.data_ptr()
            or not (x_TE.is_contiguous() and residual_TE.is_contiguous())
        ):
            return other(x_TE, residual_TE, weight, eps)
        size = _norm_size(x_TE, weight)
        check_tensor("residual", residual_TE, x_TE.shape)
        x, residual = x_TE.data_ptr(), residual_TE.data_ptr()
        run = self._norms[kind]
        check(run(x, residual, weight.data_ptr(), x_TE.numel() // size, size, eps))
        return x_TE, residual_TE

    def mean_direction(self, x_TE: torch.Tensor, size: int) -> npt.NDArray[np.float32]:
        if not _is_dense(x_TE) or not 0 < size <= x_TE.shape[1]:
            return by_torch.mean_direction(x_TE, size)
        num_rows, stride = x_TE.shape
        if size > len(self._direction):
            self._direction = np.empty(size, np.float32)
            self._direction_address = self._direction.ctypes.data  # takes longer than the mean
        out = self._direction_address
        check(self._mean_direction(x_TE.data_ptr(), num_rows, stride, size, LEAST_LENGTH, out))
        return self._direction[:size].copy()

    def activate(self, x_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
        kind = ACTIVATIONS.index(activation)
        if capture := capture_of(x_TF):
            return capture.activate(x_TF, kind)
        if not _is_dense(x_TF):
            return by_torch.activate(x_TF, activation)
        size = x_TF.shape[-1]
        check(self._activation(x_TF.data_ptr(), x_TF.numel() // max(size, 1), size, kind))
        return x_TF

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        return self._gated_activation(GraphOpKind.SILU, by_torch.silu_and_mul, gate_up_TF2)

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        other = by_torch.gelu_tanh_and_mul
        return self._gated_activation(GraphOpKind.GELU_TANH, other, gate_up_TF2)

    def gelu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        return self._gated_activation(GraphOpKind.GELU, by_torch.gelu_and_mul, gate_up_TF2)

    def _gated_activation(
        self,
        kind: GraphOpKind,
        other: Callable[[torch.Tensor], torch.Tensor],
        gate_up_TF2: torch.Tensor,
    ) -> torch.Tensor:
        if capture := capture_of(gate_up_TF2):
            return capture.gated_activation(gate_up_TF2, kind)
        if not _is_dense(gate_up_TF2):
            return other(gate_up_TF2)
        shape = gate_up_TF2.shape
        if shape[-1] % 2:
            raise ValueError(f"gate_up is {tuple(shape)}; its last dimension is twice the result's")
        size = shape[-1] // 2
        out = torch.empty((*shape[:-1], size), dtype=_FLOAT32)
        num_rows = out.numel() // size if size else 0
        code = _GATED.index(kind)
        check(self._gated(gate_up_TF2.data_ptr(), out.data_ptr(), num_rows, size, code))
        return out


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the library takes it as it lies."""
    return x.dtype is _FLOAT32 and x.is_contiguous()


def _norm_size(x: torch.Tensor, weight: torch.Tensor) -> int:
    """`weight`: [E], or [2, E]."""
    size = x.shape[-1]
    check_tensor("weight", weight, (*weight.shape[:-1], size))
    if not size:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; it must be float32 with rows of 1 up")
    return size
