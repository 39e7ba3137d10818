"""The operations on keys and values on a CPU, through the native library.

Owns the choice, a call at a time, between the library and torch: what is not float32, or lies in
memory in a way that the library does not take, goes to `TorchOperations`. Must not contain
arithmetic.
"""

from __future__ import annotations

import torch

from kernels.cpu.attention import NativeAttention, NativeAttentionPlan, NativeAttentionPlanner
from kernels.cpu.elementwise import NativeElementwise
from kernels.cpu.kv_cache import (
    KVCacheFormat,
    kind_of_cache,
    kind_of_dtype,
    read_rows,
    row_length,
    store_rows,
)
from kernels.cpu.library import NativeLibrary
from kernels.cpu.recorder import recorder_of
from kernels.interface.operations import AttentionMetadata, AttentionPlanner, KVCache
from kernels.torch.operations import TorchOperations

_FLOAT32 = torch.float32


class CpuAttentionOperations(TorchOperations):
    """See `kernels.interface.attention.AttentionOperations`."""

    def __init__(self, library: NativeLibrary) -> None:
        super().__init__()
        self._native_attention = NativeAttention(library)
        self._elementwise = NativeElementwise(library)

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
            head_size, dtype = row_length(KVCacheFormat.I8, head_size), torch.uint8
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
