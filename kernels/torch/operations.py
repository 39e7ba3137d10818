"""`Operations` on a CPU through torch.

Owns the joining of this folder's functions into one backend. Must not contain arithmetic.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from kernels.interface.operations import (
    AttentionMetadata,
    AttentionPlanner,
    ExpertWeights,
    Forward,
    KVCache,
    LinearWeight,
)
from kernels.interface.weights import WeightPacking
from kernels.torch import block_copies, elementwise, rotary, sampling
from kernels.torch.attention import PagedAttention
from kernels.torch.attention_plan import TileGroup, TilePlanner
from kernels.torch.attention_planner import TorchAttentionPlanner
from kernels.torch.experts import TorchExpertWeights, mixture_of_experts, prepare_experts
from kernels.torch.linear import TorchLinearWeight, linear, prepare_linear


class TorchOperations:
    """See `kernels.interface.operations.Operations` for every method.

    Holds attention buffers, so one thread uses an instance at a time.
    """

    def __init__(self) -> None:
        self._tiles = TilePlanner()
        self._attention = PagedAttention()

    @property
    def name(self) -> str:
        return "torch-cpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    @property
    def needs_decodes_first(self) -> bool:
        return False

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        return prepare_linear(weight_NE, bias_N)

    def weight_packing(self, dtype: torch.dtype) -> WeightPacking | None:
        return None

    def linear(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, TorchLinearWeight), "prepared by another backend"
        return linear(x_TE, weight)

    def prepare_experts(self, gate_up_XFE: torch.Tensor, down_XEF: torch.Tensor) -> ExpertWeights:
        return prepare_experts(gate_up_XFE, down_XEF)

    def mixture_of_experts(
        self,
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        experts: ExpertWeights,
        *,
        top_k: int,
        renormalise: bool,
        weights_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        assert isinstance(experts, TorchExpertWeights), "prepared by another backend"
        return mixture_of_experts(
            x_TE,
            router_logits_TX,
            experts,
            top_k=top_k,
            renormalise=renormalise,
            weights_dtype=weights_dtype,
        )

    def embedding(
        self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor | LinearWeight
    ) -> torch.Tensor:
        assert isinstance(weight_VE, torch.Tensor), "packed by another backend"
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

    def read_kv_cache(self, kv_cache: KVCache, slots_L: torch.Tensor) -> KVCache:
        keys_BSKD, values_BSKD = kv_cache
        return keys_BSKD.flatten(0, 1)[slots_L], values_BSKD.flatten(0, 1)[slots_L]

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
        assert sliding_window == metadata.sliding_window, "planned for another window"
        groups = cast("tuple[TileGroup, ...]", metadata.plan)
        return self._attention.run(
            q_THD,
            k_cache,
            v_cache,
            groups,
            scale=scale,
            softcap=softcap,
            sinks_H=sinks_H,
            alibi_slopes_H=alibi_slopes_H,
        )

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_and_mul(gate_up_TF2)

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        return elementwise.gelu_tanh_and_mul(gate_up_TF2)

    def best_of_rows(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best_R, token_ids_R = logits_RV.max(dim=1)
        return token_ids_R, best_R

    def recorded(self, forward: Forward) -> Forward:
        return forward

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
        if kv_dtype != dtype:
            raise ValueError(
                f"a KV cache of {kv_dtype} under a model of {dtype}: on a CPU only the native "
                "kernels have that, for float32 over bfloat16 or int8; leave --kv-cache-dtype at "
                "auto"
            )
        return TorchAttentionPlanner(
            tiles=self._tiles,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            sliding_window=sliding_window,
            dtype=dtype,
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

    def allocate_host_kv_cache(self, like: KVCache, num_blocks: int) -> KVCache:
        keys, values = (
            torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype) for cache in like
        )
        return keys, values

    def copy_blocks(
        self, src: KVCache, dst: KVCache, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
    ) -> None:
        block_copies.copy_blocks(src, dst, src_ids_N, dst_ids_N)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system hands out as they are written. `torch.zeros` writes them all
    at once, which takes seconds and all of the cache's memory before it is used."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
