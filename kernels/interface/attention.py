"""What attention of a step needs to know, and who makes it: data and protocol of every backend.

Owns `KVCache`, `AttentionMetadata`, `AttentionPlanner`, and the part of `Operations` that they
belong to; `kernels.interface.operations` gives them out too, and explains shape suffixes and a
step's layout.
Must not know how a backend cuts a step's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer. The layout is the backend's own: two tensors [B, S, K, D] (torch),
or views [B, K, S, D] of one allocation (Triton). Common to all: four dimensions, blocks first, the
head's elements last; everything else goes through `Operations`."""


def cached_head_bytes(head_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes of one head's key, or value, of one token in a cache of `kv_dtype`.

    Elements of int8 come with a float32 scale a head and token.
    """
    return head_size * kv_dtype.itemsize + (4 if kv_dtype is torch.int8 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """What attention must know about a step, built once a step for each KV-cache group.

    All layers of the group read it; nobody writes it. Made by `AttentionPlanner.plan`, never by
    hand.

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


class AttentionPlanner(Protocol):
    """Plans the attention of one KV-cache group, step after step.

    Made once by `Operations.make_attention_planner`. It may write its plans into memory of its own:
    a plan holds until the next one of the same planner.
    """

    def plan(
        self,
        *,
        query_start_loc_R1: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_table_RM: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        num_decodes: int,
        num_decode_tokens: int,
    ) -> AttentionMetadata:
        """Everything about a step's attention that does not depend on the layer.

        R and T are taken from the shapes of `seq_lens_R` and `slot_mapping_T`: host numbers. On a
        GPU nothing waits and no tensor is read on the host, so that the call can be captured in a
        CUDA graph and replayed for other contents.

        Args: see AttentionMetadata. The tensors live on the backend's device and must stay
            unchanged until the step's last layer has run. R may be 0.
            num_decodes: requests [0, num_decodes) compute one token each (or none: the padding of
                a bucket, with a sequence length of 0). Those after them may compute any number of
                tokens, at least 1. The results are those of the specification for any order; a
                backend with `needs_decodes_first` is slower where a request with one token comes
                later, and the last bits of such a request may differ. The torch backend takes no
                notice.
            num_decode_tokens: tokens of the first `num_decodes` requests together: equal to
                `num_decodes` as long as no decode carries drafts.

        Raises:
            ValueError: more requests or tokens than the planner was made for.
        """
        ...


class AttentionOperations(Protocol):
    """The operations on keys and values; a part of `kernels.interface.operations.Operations`."""

    @property
    def needs_decodes_first(self) -> bool:
        """Whether a step's requests should be ordered: those that compute one token first."""
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

    def read_kv_cache(self, kv_cache: KVCache, slots_L: torch.Tensor) -> KVCache:
        """(k_LKD, v_LKD) of int64 `slots_L`, in the cache's dtype (int8: float32): a copy."""
        ...

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
        """Causal attention of this step's tokens over the cache, which already holds their k, v.

        A query at position p sees keys in (p - sliding_window, p], or [0, p] without a window.
        Scores are `scale * q @ k`, then `softcap * tanh(score / softcap)` if softcap is given, then
        plus `slope * (key position - query position)` if slopes are (ALiBi, arXiv:2108.12409).
        Query head h reads key/value head `h // (H / K)`.

        Args:
            k_cache, v_cache: the KVCache of the layer.
            metadata: planned with the same `sliding_window` and head counts.
            sinks_H: float32, a score a head that takes part in the softmax and has no value.
            alibi_slopes_H: float32, of each head.

        Returns:
            out_THD.
        """
        ...

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
        """What plans the steps of one KV-cache group: layers of equal heads and window. Made once,
        with all memory that its plans will need.

        Args:
            block_size: a power of two, if the device is a GPU.
            max_num_seqs, max_num_batched_tokens: most requests and tokens of a step.
            max_model_len: most tokens of a request.
            dtype: of q.
            kv_dtype: of the cache: `dtype`, or float8_e4m3fn, bfloat16 or int8 where the backend
                has it.

        Raises:
            ValueError: heads, a block size or a dtype that the backend cannot take.
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
        """The zeroed cache of one layer on `device`, in the backend's own layout.

        Args:
            dtype: the planner's `kv_dtype`.
        """
        ...

    def allocate_host_kv_cache(self, like: KVCache, num_blocks: int) -> KVCache:
        """`num_blocks` blocks in host memory, in the layout of `like`; what they hold is undefined.

        Page-locked where the device is a GPU. On a CPU the system hands out a page when it is
        first written.
        """
        ...

    def copy_blocks(
        self, src: KVCache, dst: KVCache, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
    ) -> None:
        """`dst[dst_ids[i]] = src[src_ids[i]]`, keys and values; all is read before any is written.

        Args: src and dst may be one cache, or one of them in host memory. ids: int64 on the CPU,
            `dst_ids_N` each once.
        """
        ...
