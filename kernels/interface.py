"""The one entrance to device operations: what models and layers may ask of a backend.

Owns the `Operations` protocol and the data that crosses it. It must not know any model, the
scheduler, or how a backend works. Every backend gives the results of the torch one
(`kernels/torch_ops`), which is the specification.

Shape suffixes: T tokens in the step, R requests, H query heads, K key/value heads, D head size,
E inputs of a layer, N outputs of a layer, F feed-forward, V vocabulary, B blocks, S slots a block,
M block-table width, P positions.

Layout of a step: the tokens of all requests lie one after another along T, and the tokens of
request r are `query_start_loc_R1[r]:query_start_loc_R1[r + 1]`. They are the last tokens of its
sequence, which is `seq_lens_R[r]` long with them:

    sequence of r   [0 ........ computed)[computed ........ seq_len)
                     in the cache         this step's tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

KVCache = tuple[torch.Tensor, torch.Tensor]
"""The (k_cache_BSKD, v_cache_BSKD) of one layer."""


class LinearWeight(Protocol):
    """A weight in the layout its backend computes with; made by `Operations.prepare_linear`."""

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """What attention must know about a step, built once a step for each KV-cache group.

    All layers of the group read it; nobody writes it. The runner makes it through
    `Operations.plan_attention`, never by hand.

    Attributes:
        query_start_loc_R1: int32 [R + 1], where each request's tokens start; the last entry is T.
        seq_lens_R: int32 [R], tokens of each request including those of this step.
        block_table_RM: int32 [R, M], physical block of each logical block. Entries past the
            sequence's end, and those wholly left of the sliding window, are never used and must
            hold a block id in range (0, the null block, by convention).
        slot_mapping_T: int64 [T], `block id * block_size + offset` where each token's key and
            value are written.
        block_size: slots in a block.
        sliding_window: what the plan was made for; None is full attention.
        plan: private to the backend that made it.
    """

    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RM: torch.Tensor
    slot_mapping_T: torch.Tensor
    block_size: int
    sliding_window: int | None
    plan: object


class Operations(Protocol):
    """The operations of one device. Tensors live on `device`; floating dtype is the model's.

    Unless said otherwise an operation mutates none of its arguments and returns a new tensor.
    """

    @property
    def name(self) -> str:
        """Name of the backend, for reports: "torch-cpu"."""
        ...

    @property
    def device(self) -> torch.device: ...

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        """Take a weight over for `linear`. The caller drops its own reference: a backend may keep
        the tensor itself or a copy in another layout, never both, and changes neither (so an
        embedding may be given that stays in use). Called at load time only.
        """
        ...

    def linear(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """`x @ weight.T + bias` -> [T, N]."""
        ...

    def embedding(self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        """Rows of `weight_VE` for int64 ids in [0, V) -> [T, E]."""
        ...

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32.

        The normalised value is rounded to the dtype of the weight before it is multiplied, and the
        product to the dtype of x: a float32 weight keeps the product in float32 (Gemma), a weight
        in the model's dtype rounds first (Llama).
        """
        ...

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + x`, and its `rms_norm` -> (normed, new residual).

        Both arguments are consumed: the results may share their memory.
        """
        ...

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
        """Norm (if weights are given) and rotate q and k, write k and v to the cache.

        Args:
            qkv_TN: [T, (H + 2K) * D], heads of q, then k, then v. Consumed: may be overwritten.
            cos_sin_PD: one row a position, cosines then sines, each rotary_size / 2 wide. Only the
                first rotary_size elements of a head turn (halves, not neighbours, form pairs).
            positions_T: int64, each below P.
            slot_mapping_T: int64, see AttentionMetadata.
            kv_cache: written in place; its K gives the number of key/value heads.

        Returns:
            q_THD, rotated.
        """
        ...

    def write_kv_cache(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: KVCache,
        slot_mapping_T: torch.Tensor,
    ) -> None:
        """Write keys and values as they are to `kv_cache` at `slot_mapping_T`."""
        ...

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
        """Causal attention of this step's tokens over the cache, which already holds their k, v.

        A query at position p sees keys in (p - sliding_window, p], or [0, p] without a window.
        Scores are `scale * q @ k`, then `softcap * tanh(score / softcap)` if softcap is given.
        Query head h reads key/value head `h // (H / K)`.

        Args:
            metadata: planned with the same `sliding_window` and head counts.

        Returns:
            out_THD.
        """
        ...

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """`silu(left half) * right half` of [T, 2F] -> [T, F]. Consumes its argument."""
        ...

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """`gelu(left half, tanh approximation) * right half` of [T, 2F] -> [T, F]. Consumes."""
        ...

    def sample_from_all(
        self, logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor
    ) -> torch.Tensor:
        """One token a row, int64 [R], each with its softmax probability.

        `argmax((logits - max) + noise)`, with standard Gumbel noise that is a function of (seed,
        position, token) alone; every backend computes the same (see `kernels.torch_ops.sampling`).

        Args:
            logits_RV: float32.
            seeds_R: the 64 bits of each row's seed, as int64.
            positions_R: int64, index in the sequence of the token being chosen.
        """
        ...

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
        """`sample_from_all` over what min_p, top_k and top_p leave, in that order.

        Args:
            top_k_R: int64, 0 for no limit; tokens that tie with the k-th stay.
            top_p_R: float32; the token that crosses p stays.
            min_p_R: float32, 0 for no limit.
        """
        ...

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
        """Penalise tokens of one row of logits in place.

        Args:
            prompt_mask_V: bool, tokens of the prompt: they count for repetition only.
            output_counts_V: float32, occurrences in the output.
        """
        ...

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
        """Everything about a step's attention that does not depend on the layer.

        Args: see AttentionMetadata. Every request has at least one token in the step; R may be 0.
            The tensors must stay unchanged until the step's last layer has run.
            dtype: of q and of the cache.
        """
        ...

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> KVCache:
        """The zeroed cache of one layer: two tensors [B, S, K, D]."""
        ...

    def copy_blocks(
        self, src: KVCache, dst: KVCache, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
    ) -> None:
        """`dst[dst_ids[i]] = src[src_ids[i]]`, keys and values; all is read before any is written.

        Args: src and dst may be one cache, or one of them in host memory. ids: int64 on the CPU,
            `dst_ids_N` each once.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What one forward pass of a model reads besides tokens and positions.

    Attributes:
        kv_caches: by layer.
        metadata: by layer; layers of one KV-cache group share an object.
        ops: the backend that made both.
    """

    kv_caches: Sequence[KVCache]
    metadata: Sequence[AttentionMetadata]
    ops: Operations
