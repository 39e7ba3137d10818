"""`Operations` on a CPU through torch.

Owns the joining of this folder's functions into one backend. Must not contain arithmetic.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from kernels.interface import AttentionMetadata, KVCache, LinearWeight
from kernels.torch_ops import block_copies, elementwise, rotary, sampling
from kernels.torch_ops.attention import PagedAttention
from kernels.torch_ops.attention_plan import AttentionPlanner, TileGroup
from kernels.torch_ops.linear import TorchLinearWeight, linear, prepare_linear


class TorchOperations:
    """See `kernels.interface.Operations` for every method.

    Holds attention buffers, so one thread uses an instance at a time.
    """

    def __init__(self) -> None:
        self._planner = AttentionPlanner()
        self._attention = PagedAttention()

    @property
    def name(self) -> str:
        return "torch-cpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        return prepare_linear(weight_NE, bias_N)

    def linear(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, TorchLinearWeight), "prepared by another backend"
        return linear(x_TE, weight)

    def embedding(self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids_T, weight_VE)

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual_TE.add_(x_TE)
        return elementwise.rms_norm(residual_TE, weight_E, eps), residual_TE

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
        return rotary.rotary_and_cache(
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

    def write_kv_cache(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: KVCache,
        slot_mapping_T: torch.Tensor,
    ) -> None:
        rotary.write_kv_cache(k_TKD, v_TKD, kv_cache, slot_mapping_T)

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_cache_BSKD: torch.Tensor,
        v_cache_BSKD: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        assert sliding_window == metadata.sliding_window, "planned for another window"
        groups = cast("tuple[TileGroup, ...]", metadata.plan)
        return self._attention.run(
            q_THD, k_cache_BSKD, v_cache_BSKD, groups, scale=scale, softcap=softcap
        )

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_and_mul(gate_up_TF2)

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        return elementwise.gelu_tanh_and_mul(gate_up_TF2)

    def sample_from_all(
        self, logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return sampling.sample_from_all(logits_RV, seeds_R, positions_R)

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
        return sampling.sample_truncated(
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
        sampling.apply_penalties(
            logits_V,
            prompt_mask_V,
            output_counts_V,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )

    def plan_attention(
        self,
        *,
        query_start_loc_R1: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_table_RM: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        block_size: int,
        num_query_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        sliding_window: int | None = None,
    ) -> AttentionMetadata:
        groups = self._planner.plan(
            query_start_loc_R1=query_start_loc_R1.numpy().astype(np.int64),
            seq_lens_R=seq_lens_R.numpy().astype(np.int64),
            block_table_RM=block_table_RM.numpy().astype(np.int64),
            block_size=block_size,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            sliding_window=sliding_window,
        )
        return AttentionMetadata(
            query_start_loc_R1=query_start_loc_R1,
            seq_lens_R=seq_lens_R,
            block_table_RM=block_table_RM,
            slot_mapping_T=slot_mapping_T,
            block_size=block_size,
            sliding_window=sliding_window,
            plan=groups,
        )

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> KVCache:
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        return _untouched_zeros(shape, dtype), _untouched_zeros(shape, dtype)

    def copy_blocks(
        self, src: KVCache, dst: KVCache, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
    ) -> None:
        block_copies.copy_blocks(src, dst, src_ids_N, dst_ids_N)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system hands out as they are written. `torch.zeros` writes them all
    at once, which takes seconds and all of the cache's memory before it is used."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
