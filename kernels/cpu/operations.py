"""`Operations` on a CPU through the native library.

Owns the choice, a call at a time, between the library and torch: what is not float32, or lies in
memory in a way that the library does not take, goes to `TorchOperations`. Must not contain
arithmetic.
"""

from __future__ import annotations

import torch

from kernels.cpu.attention import NativeAttention, NativeAttentionPlan, NativeAttentionPlanner
from kernels.cpu.elementwise import NativeElementwise
from kernels.cpu.kv_cache import (
    StoredKind,
    kind_of_cache,
    kind_of_dtype,
    read_rows,
    row_length,
    store_rows,
)
from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import NativeLinear, PackedParts
from kernels.cpu.packing import FloatFormat, NativePacking
from kernels.cpu.recording import GELU_TANH, SILU, RecordedForward, recorder_of
from kernels.cpu.sampling import NativeSampling
from kernels.cpu.weights import PackedLinear
from kernels.interface import (
    AttentionMetadata,
    AttentionPlanner,
    Forward,
    KVCache,
    LinearWeight,
)
from kernels.torch_ops.operations import TorchOperations
from kernels.weight_packing import WeightPacking

_FLOAT32 = torch.float32


class CpuOperations(TorchOperations):
    """See `kernels.interface.Operations` for every method. One thread uses an instance at a time.

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
        super().__init__()
        self._library = library
        self._packing = NativePacking(library, linear_weights, keeps_blocks=keeps_blocks)
        self._native_linear = NativeLinear(library)
        self._native_attention = NativeAttention(library)
        self._elementwise = NativeElementwise(library)
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

    def rotary_and_cache(
        self,
        qkv_TN: torch.Tensor,
        *,
        num_query_heads: int,
        head_size: int,
        cos_sin_PD: torch.Tensor,
        positions_T: torch.Tensor,
        kv_cache: KVCache,
        slot_mapping_T: torch.Tensor,
        q_norm_weight_D: torch.Tensor | None = None,
        k_norm_weight_D: torch.Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> torch.Tensor:
        if recorder := recorder_of(qkv_TN):
            return recorder.rotary_and_cache(
                qkv_TN,
                num_query_heads=num_query_heads,
                head_size=head_size,
                cos_sin_PD=cos_sin_PD,
                positions_T=positions_T,
                k_cache_BSKD=kv_cache[0],
                v_cache_BSKD=kv_cache[1],
                slot_mapping_T=slot_mapping_T,
                q_norm_weight_D=q_norm_weight_D,
                k_norm_weight_D=k_norm_weight_D,
                norm_eps=norm_eps,
            )
        if (
            qkv_TN.dtype is not _FLOAT32
            or kind_of_cache(kv_cache[0]) is None
            or not qkv_TN.is_contiguous()
        ):
            return super().rotary_and_cache(
                qkv_TN,
                num_query_heads=num_query_heads,
                head_size=head_size,
                cos_sin_PD=cos_sin_PD,
                positions_T=positions_T,
                kv_cache=kv_cache,
                slot_mapping_T=slot_mapping_T,
                q_norm_weight_D=q_norm_weight_D,
                k_norm_weight_D=k_norm_weight_D,
                norm_eps=norm_eps,
            )
        return self._elementwise.rotary_and_cache(
            qkv_TN,
            num_query_heads=num_query_heads,
            head_size=head_size,
            cos_sin_PD=cos_sin_PD,
            positions_T=positions_T,
            k_cache_BSKD=kv_cache[0],
            v_cache_BSKD=kv_cache[1],
            slot_mapping_T=slot_mapping_T,
            q_norm_weight_D=q_norm_weight_D,
            k_norm_weight_D=k_norm_weight_D,
            norm_eps=norm_eps,
        )

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
        alibi_slopes_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = metadata.plan
        if not isinstance(plan, NativeAttentionPlan):
            return super().paged_attention(
                q_THD,
                k_cache,
                v_cache,
                metadata,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks_H=sinks_H,
                alibi_slopes_H=alibi_slopes_H,
            )
        assert sliding_window == metadata.sliding_window, "planned for another window"
        if recorder := recorder_of(q_THD):
            return recorder.paged_attention(
                q_THD,
                k_cache,
                v_cache,
                plan,
                scale=scale,
                softcap=softcap,
                sinks_H=sinks_H,
                alibi_slopes_H=alibi_slopes_H,
            )
        return self._native_attention.run(
            q_THD,
            k_cache,
            v_cache,
            plan,
            scale=scale,
            softcap=softcap,
            sinks_H=sinks_H,
            alibi_slopes_H=alibi_slopes_H,
        )

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        if recorder := recorder_of(gate_up_TF2):
            return recorder.gated_activation(gate_up_TF2, SILU)
        if gate_up_TF2.dtype is not _FLOAT32 or not gate_up_TF2.is_contiguous():
            return super().silu_and_mul(gate_up_TF2)
        return self._elementwise.silu_and_mul(gate_up_TF2)

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        if recorder := recorder_of(gate_up_TF2):
            return recorder.gated_activation(gate_up_TF2, GELU_TANH)
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

    def make_attention_planner(
        self,
        *,
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        sliding_window: int | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> AttentionPlanner:
        stored_kind = kind_of_dtype(kv_dtype)
        if dtype is not _FLOAT32 or stored_kind is None:
            return super().make_attention_planner(
                num_query_heads=num_query_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                block_size=block_size,
                sliding_window=sliding_window,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                dtype=dtype,
                kv_dtype=kv_dtype,
            )
        return NativeAttentionPlanner(
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            sliding_window=sliding_window,
            stored_kind=stored_kind,
        )

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> KVCache:
        if dtype is torch.int8:
            head_size, dtype = row_length(StoredKind.I8, head_size), torch.uint8
        return super().allocate_kv_cache(num_blocks, block_size, num_kv_heads, head_size, dtype)

    def write_kv_cache(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: KVCache,
        slot_mapping_T: torch.Tensor,
    ) -> None:
        keys, values = kv_cache
        super().write_kv_cache(
            store_rows(k_TKD, keys),
            store_rows(v_TKD, values),
            kv_cache=kv_cache,
            slot_mapping_T=slot_mapping_T,
        )

    def read_kv_cache(self, kv_cache: KVCache, slots_L: torch.Tensor) -> KVCache:
        keys, values = super().read_kv_cache(kv_cache, slots_L)
        if keys.dtype is torch.uint8:
            return read_rows(keys), read_rows(values)
        return keys, values
