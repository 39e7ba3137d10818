"""`Operations` on a CPU through the native library.

Owns the choice, a call at a time, between the library and torch (for keys and values it stands in
`kernels.cpu.attention_operations`): what is not float32, or lies in memory in a way that the
library does not take, goes to `TorchOperations`. Must not contain arithmetic.
"""

from __future__ import annotations

import torch

from kernels.cpu.attention_operations import CpuAttentionOperations
from kernels.cpu.commands import CommandKind
from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import NativeLinear, PackedParts
from kernels.cpu.packing import FloatFormat, NativePacking
from kernels.cpu.recorder import recorder_of
from kernels.cpu.recording import RecordedForward
from kernels.cpu.sampling import NativeSampling
from kernels.cpu.weights import PackedLinear
from kernels.interface.operations import Forward, LinearWeight
from kernels.interface.weights import WeightPacking

_FLOAT32 = torch.float32


class CpuOperations(CpuAttentionOperations):
    """See `kernels.interface.operations.Operations` for every method. One thread uses an instance
    at a time.

    Args:
        library: from `kernels.cpu.library.load_library`.
        linear_weights: what floating weights become, see `NativePacking`.
        keeps_blocks: see there.

    Raises:
        ValueError: another name for `linear_weights`.
    """

    def __init__(
        self,
        library: NativeLibrary,
        *,
        linear_weights: FloatFormat = "float32",
        keeps_blocks: bool = True,
    ) -> None:
        super().__init__(library)
        self._library = library
        self._packing = NativePacking(library, linear_weights, keeps_blocks=keeps_blocks)
        self._native_linear = NativeLinear(library)
        self._sampling = NativeSampling(library)

    @property
    def name(self) -> str:
        return f"native-cpu-{self._library.isa}"

    def recorded(self, forward: Forward) -> Forward:
        return RecordedForward(self._library, forward)

    @property
    def num_threads(self) -> int:
        return self._library.num_threads

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        if weight_NE.dtype is not _FLOAT32:
            return super().prepare_linear(weight_NE, bias_N)
        return self._packing.pack_alone(weight_NE, bias_N)

    def weight_packing(self, dtype: torch.dtype) -> WeightPacking | None:
        return self._packing if dtype is _FLOAT32 else None

    def linear(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if recorder := recorder_of(x_TE):
            return recorder.linear(x_TE, weight)
        if not isinstance(weight, PackedLinear | PackedParts):
            return super().linear(x_TE, weight)
        return self._native_linear(x_TE, weight)

    def embedding(
        self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor | LinearWeight
    ) -> torch.Tensor:
        if recorder := recorder_of(token_ids_T):
            return recorder.embedding(weight_VE)
        if isinstance(weight_VE, PackedLinear):
            return self._native_linear.gather_rows(token_ids_T, weight_VE)
        assert isinstance(weight_VE, torch.Tensor), "packed by another backend"
        if weight_VE.dtype is not _FLOAT32 or not (
            weight_VE.is_contiguous() and token_ids_T.is_contiguous()
        ):
            return super().embedding(token_ids_T, weight_VE)
        return self._elementwise.embedding(token_ids_T, weight_VE)

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        if recorder := recorder_of(x_TE):
            return recorder.rms_norm(x_TE, weight_E, eps)
        if x_TE.dtype is not _FLOAT32 or weight_E.dtype is not _FLOAT32:
            return super().rms_norm(x_TE, weight_E, eps)
        return self._elementwise.rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if recorder := recorder_of(x_TE):
            return recorder.add_rms_norm(x_TE, residual_TE, weight_E, eps)
        if (
            x_TE.dtype is not _FLOAT32
            or weight_E.dtype is not _FLOAT32
            or x_TE.data_ptr() == residual_TE.data_ptr()
            or not (x_TE.is_contiguous() and residual_TE.is_contiguous())
        ):
            return super().add_rms_norm(x_TE, residual_TE, weight_E, eps)
        return self._elementwise.add_rms_norm(x_TE, residual_TE, weight_E, eps)

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        if recorder := recorder_of(gate_up_TF2):
            return recorder.gated_activation(gate_up_TF2, CommandKind.SILU)
        if gate_up_TF2.dtype is not _FLOAT32 or not gate_up_TF2.is_contiguous():
            return super().silu_and_mul(gate_up_TF2)
        return self._elementwise.silu_and_mul(gate_up_TF2)

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        if recorder := recorder_of(gate_up_TF2):
            return recorder.gated_activation(gate_up_TF2, CommandKind.GELU_TANH)
        if gate_up_TF2.dtype is not _FLOAT32 or not gate_up_TF2.is_contiguous():
            return super().gelu_tanh_and_mul(gate_up_TF2)
        return self._elementwise.gelu_tanh_and_mul(gate_up_TF2)

    def best_of_rows(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sampling.best_of_rows(logits_RV)

    def sample_from_all(
        self, logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return self._sampling.sample_from_all(logits_RV, seeds_R, positions_R)

    def sample_truncated(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        *,
        top_k_R: torch.Tensor,
        top_p_R: torch.Tensor,
        min_p_R: torch.Tensor,
    ) -> torch.Tensor:
        return self._sampling.sample_truncated(
            logits_RV, seeds_R, positions_R, top_k_R=top_k_R, top_p_R=top_p_R, min_p_R=min_p_R
        )

    def apply_penalties(
        self,
        logits_V: torch.Tensor,
        prompt_mask_V: torch.Tensor,
        output_counts_V: torch.Tensor,
        *,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
    ) -> None:
        self._sampling.apply_penalties(
            logits_V,
            prompt_mask_V,
            output_counts_V,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
