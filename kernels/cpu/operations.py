"""`Operations` on a CPU through the native library. Calls that it does not take, for their dtype or
layout, go to `TorchOperations`; operations on placeholders are captured (`graph_capture`).
"""

from __future__ import annotations

import torch

from kernels.cpu.attention import NativeAttention, NativeAttentionPlan, NativeAttentionPlanner
from kernels.cpu.captured_forward import CapturedForward
from kernels.cpu.elementwise import NativeElementwise
from kernels.cpu.graph_capture import GraphOpKind, capture_of
from kernels.cpu.kv_cache import (
    KVCacheFormat,
    format_of_cache,
    format_of_dtype,
    read_rows,
    row_length,
    store_rows,
)
from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import NativeLinear, PackedParts
from kernels.cpu.packing import FloatFormat, NativePacking
from kernels.cpu.sampling import NativeSampling
from kernels.cpu.weights import PackedLinear
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionParams,
    AttentionPlanner,
    AttentionSpec,
    Forward,
    KVCache,
    Penalties,
    RotaryParams,
    SamplingLimits,
)
from kernels.interface.weights import LinearWeight, WeightPacking
from kernels.torch.operations import TorchOperations

_FLOAT32 = torch.float32


class CpuOperations(TorchOperations):
    """See `kernels.interface.operations.Operations` for every method. One thread uses an instance
    at a time.

    Args:
        library: from `kernels.cpu.library.load_library`.
        linear_weights: what floating weights become, see `NativePacking`.
        keeps_blocks: see there.
    """

    def __init__(
        self,
        library: NativeLibrary,
        *,
        linear_weights: FloatFormat = "float32",
        keeps_blocks: bool = True,
    ) -> None:
        super().__init__()
        self._library = library
        self._packing = NativePacking(library, linear_weights, keeps_blocks=keeps_blocks)
        self._native_attention = NativeAttention(library)
        self._elementwise = NativeElementwise(library)
        self._native_linear = NativeLinear(library)
        self._sampling = NativeSampling(library)

    @property
    def name(self) -> str:
        return f"native-cpu-{self._library.isa}"

    def capture(self, forward: Forward) -> Forward:
        return CapturedForward(self._library, forward)

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
        if capture := capture_of(x_TE):
            return capture.linear(x_TE, weight)
        if not isinstance(weight, PackedLinear | PackedParts):
            return super().linear(x_TE, weight)
        return self._native_linear(x_TE, weight)

    def embedding(
        self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor | LinearWeight
    ) -> torch.Tensor:
        if capture := capture_of(token_ids_T):
            return capture.embedding(weight_VE)
        if isinstance(weight_VE, PackedLinear):
            return self._native_linear.gather_rows(token_ids_T, weight_VE)
        assert isinstance(weight_VE, torch.Tensor), "packed by another backend"
        if weight_VE.dtype is not _FLOAT32 or not (
            weight_VE.is_contiguous() and token_ids_T.is_contiguous()
        ):
            return super().embedding(token_ids_T, weight_VE)
        return self._elementwise.embedding(token_ids_T, weight_VE)

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        if capture := capture_of(x_TE):
            return capture.rms_norm(x_TE, weight_E, eps)
        if x_TE.dtype is not _FLOAT32 or weight_E.dtype is not _FLOAT32:
            return super().rms_norm(x_TE, weight_E, eps)
        return self._elementwise.rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if capture := capture_of(x_TE):
            return capture.add_rms_norm(x_TE, residual_TE, weight_E, eps)
        if (
            x_TE.dtype is not _FLOAT32
            or weight_E.dtype is not _FLOAT32
            or x_TE.data_ptr() == residual_TE.data_ptr()
            or not (x_TE.is_contiguous() and residual_TE.is_contiguous())
        ):
            return super().add_rms_norm(x_TE, residual_TE, weight_E, eps)
        return self._elementwise.add_rms_norm(x_TE, residual_TE, weight_E, eps)

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        if capture := capture_of(gate_up_TF2):
            return capture.gated_activation(gate_up_TF2, GraphOpKind.SILU)
        if gate_up_TF2.dtype is not _FLOAT32 or not gate_up_TF2.is_contiguous():
            return super().silu_and_mul(gate_up_TF2)
        return self._elementwise.silu_and_mul(gate_up_TF2)

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        if capture := capture_of(gate_up_TF2):
            return capture.gated_activation(gate_up_TF2, GraphOpKind.GELU_TANH)
        if gate_up_TF2.dtype is not _FLOAT32 or not gate_up_TF2.is_contiguous():
            return super().gelu_tanh_and_mul(gate_up_TF2)
        return self._elementwise.gelu_tanh_and_mul(gate_up_TF2)

    def rotary_and_cache(
        self,
        qkv_TN: torch.Tensor,
        positions_T: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache,
        params: RotaryParams,
    ) -> torch.Tensor:
        call = (qkv_TN, positions_T, slot_mapping_T, kv_cache, params)
        if capture := capture_of(qkv_TN):
            return capture.rotary_and_cache(*call)
        if (
            qkv_TN.dtype is not _FLOAT32
            or format_of_cache(kv_cache[0]) is None
            or not qkv_TN.is_contiguous()
        ):
            return super().rotary_and_cache(*call)
        return self._elementwise.rotary_and_cache(*call)

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        plan = metadata.plan
        if not isinstance(plan, NativeAttentionPlan):
            return super().paged_attention(q_THD, k_cache, v_cache, metadata, params)
        assert params.sliding_window == metadata.sliding_window, "planned for another window"
        capture = capture_of(q_THD)
        run = self._native_attention.run if capture is None else capture.paged_attention
        return run(q_THD, k_cache, v_cache, plan, params)

    def make_attention_planner(self, spec: AttentionSpec) -> AttentionPlanner:
        if spec.dtype is not _FLOAT32 or format_of_dtype(spec.kv_dtype) is None:
            return super().make_attention_planner(spec)
        return NativeAttentionPlanner(spec)

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> KVCache:
        if dtype is torch.int8:
            head_size, dtype = row_length(KVCacheFormat.I8, head_size), torch.uint8
        return super().allocate_kv_cache(num_blocks, block_size, num_kv_heads, head_size, dtype)

    def write_kv_cache(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache,
    ) -> None:
        keys, values = kv_cache
        k_TKD, v_TKD = store_rows(k_TKD, keys), store_rows(v_TKD, values)
        super().write_kv_cache(k_TKD, v_TKD, slot_mapping_T, kv_cache)

    def read_kv_cache(self, kv_cache: KVCache, slots_L: torch.Tensor) -> KVCache:
        keys, values = super().read_kv_cache(kv_cache, slots_L)
        if keys.dtype is torch.uint8:
            return read_rows(keys), read_rows(values)
        return keys, values

    def best_of_rows(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sampling.best_of_rows(logits_RV)

    def sample(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        limits: SamplingLimits | None = None,
    ) -> torch.Tensor:
        return self._sampling.sample(logits_RV, seeds_R, positions_R, limits)

    def apply_penalties(
        self,
        logits_V: torch.Tensor,
        prompt_mask_V: torch.Tensor,
        output_counts_V: torch.Tensor,
        penalties: Penalties,
    ) -> None:
        self._sampling.apply_penalties(logits_V, prompt_mask_V, output_counts_V, penalties)
