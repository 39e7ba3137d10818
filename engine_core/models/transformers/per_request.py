"""transformers' models with attention of their own: one request after another, over paged KV.

Slower than a flattened step, and right for whatever a model does with keys and values (ALiBi,
biases, local attention by mask): it sees a transformers Cache that holds its whole sequence, only
that the keys and values live in the engine's blocks. Must not know any architecture.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from engine_core.models.interface import KVCacheSpec
from engine_core.models.transformers.attention import tokens_first
from engine_core.models.transformers.body import CausalBody
from kernels.interface.operations import AttentionMetadata, ForwardContext, KVCache, Operations


class PagedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of one request, for one forward pass.

    Args:
        read_slots_L: int64, slot of every token of the sequence, this step's included.
        write_slots_Q: int64, those of this step's tokens, which are the last ones.
    """

    is_sliding = False

    def __init__(
        self,
        kv_cache: KVCache,
        ops: Operations,
        read_slots_L: torch.Tensor,
        write_slots_Q: torch.Tensor,
    ) -> None:
        super().__init__()
        self._kv_cache = kv_cache
        self._ops = ops
        self._read_slots_L = read_slots_L
        self._write_slots_Q = write_slots_Q
        self._num_seen = len(read_slots_L) - len(write_slots_Q)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the blocks are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, K, Q, d] keys and values -> those of the whole sequence, [1, K, L, d]."""
        head_size = self._kv_cache[0].shape[3]
        self._ops.write_kv_cache(
            tokens_first(key_states, head_size),
            tokens_first(value_states, head_size),
            kv_cache=self._kv_cache,
            slot_mapping_T=self._write_slots_Q,
        )
        self._num_seen = len(self._read_slots_L)
        keys, values = (
            states_LKD.transpose(0, 1)[None, :, :, :own_size]
            for states_LKD, own_size in zip(
                self._ops.read_kv_cache(self._kv_cache, self._read_slots_L),
                (key_states.shape[3], value_states.shape[3]),
                strict=True,
            )
        )
        return keys, values

    def get_seq_length(self) -> int:
        return self._num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys, position of the first one)."""
        return self._num_seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PerRequestModel:
    """`engine_core.models.Model` that runs its requests one by one."""

    def __init__(self, body: CausalBody, spec: KVCacheSpec) -> None:
        self._body = body
        self._spec = spec

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return self._spec

    @torch.inference_mode()
    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See `Model.forward`."""
        first = context.metadata[0]
        starts = first.query_start_loc_R1.tolist()
        hidden_by_request = [
            self._forward_request(
                request, token_ids_T[start:stop], positions_T[start:stop], start, context
            )
            for request, (start, stop) in enumerate(itertools.pairwise(starts))
        ]
        return torch.cat(hidden_by_request)

    def _forward_request(
        self,
        request: int,
        token_ids_Q: torch.Tensor,
        positions_Q: torch.Tensor,
        start: int,
        context: ForwardContext,
    ) -> torch.Tensor:
        stop = start + len(token_ids_Q)
        # layers of one KV-cache group share a metadata object, and with it the slots
        slots = {
            key: _slots_of_sequence(metadata, request)
            for key, metadata in {id(each): each for each in context.metadata}.items()
        }
        layers = [
            PagedCacheLayer(
                kv_cache, context.ops, slots[id(metadata)], metadata.slot_mapping_T[start:stop]
            )
            for kv_cache, metadata in zip(context.kv_caches, context.metadata, strict=True)
        ]
        num_tokens = int(context.metadata[0].seq_lens_R[request])
        return self._body.hidden_states(
            token_ids_Q,
            attention_mask=torch.ones(1, num_tokens, dtype=torch.int64),
            position_ids=positions_Q[None],
            past_key_values=Cache(layers=layers),
            use_cache=True,
        )

    @torch.inference_mode()
    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        return self._body.logits(hidden_RE)


def _slots_of_sequence(metadata: AttentionMetadata, request: int) -> torch.Tensor:
    positions_L = torch.arange(
        int(metadata.seq_lens_R[request]), device=metadata.block_table_RM.device
    )
    blocks_L = metadata.block_table_RM[request, positions_L // metadata.block_size].long()
    return blocks_L * metadata.block_size + positions_L % metadata.block_size
