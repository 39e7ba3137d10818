"""An encoder-decoder model as the runner sees it. The encoder runs once a request, as transformers
has it; its keys and values go into blocks of the request, which every step reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine_core.models.encoder_decoder.inputs import EncoderInputs
from engine_core.models.encoder_decoder.parts import AttentionWeights, DecoderParts
from engine_core.models.interface import Feature, ModelSpec
from engine_core.models.layer_cache import paged_keys
from engine_core.models.multimodal.interface import InputFamily, Tensors
from kernels.interface.kv_cache import KVCache
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionParams,
    ForwardContext,
    Operations,
)


class EncoderDecoderModel:
    """Implements `engine_core.models.interface.EncoderDecoder`, and is its own `MultiModalEncoder`.

    A layer's own keys and values and those of the encoder lie in the same cache tensor, in
    different blocks."""

    supports: frozenset[Feature] = frozenset({"prompt_embeds"})

    def __init__(
        self, encoder: Any, parts: DecoderParts, inputs: EncoderInputs, *, vocab_size: int
    ) -> None:
        self.family: InputFamily = inputs
        self.max_encoder_tokens = inputs.most_rows
        self._encoder = encoder
        self._parts = parts
        self.spec = ModelSpec(
            layers=paged_keys(parts.num_heads, parts.head_size, (None,) * len(parts.layers)),
            num_query_heads=parts.num_heads,
            vocab_size=vocab_size,
            hidden_size=parts.hidden_size,
            max_model_len=parts.max_positions,
        )

    # ------------------------------------------------------------------ the encoder

    @torch.inference_mode()
    def encode(self, tensors: Tensors) -> torch.Tensor:
        """One input, without a dimension for a batch -> hidden_SE."""
        batch = {name: torch.from_numpy(np.array(array))[None] for name, array in tensors.items()}
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                batch[name] = tensor.to(self._encoder.dtype)
        hidden_SE: torch.Tensor = self._encoder(**batch).last_hidden_state[0]
        return hidden_SE

    @torch.inference_mode()
    def write_encoded(
        self,
        hidden_SE: torch.Tensor,
        slots_S: torch.Tensor,
        kv_caches: Sequence[KVCache],
        ops: Operations,
    ) -> None:
        """Every layer's keys and values of what an encoder gave, to these slots."""
        for layer, kv_cache in zip(self._parts.layers, kv_caches, strict=True):
            attention = layer.cross_attention
            ops.write_kv_cache(
                self._heads(attention.key(hidden_SE)),
                self._heads(attention.value(hidden_SE)),
                slots_S,
                kv_cache,
            )

    # ------------------------------------------------------------------ the decoder

    @torch.inference_mode()
    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See `Model.forward`; `context.encoded` says where each token's encoder output is."""
        parts = self._parts
        hidden_TE = parts.embed(token_ids_T, positions_T)
        for index, layer in enumerate(parts.layers):
            for sublayer, norm in (
                (self._attend_to_tokens, layer.self_norm),
                (self._attend_to_encoder, layer.cross_norm),
            ):
                x_TE = norm(hidden_TE) if parts.norms_first else hidden_TE
                hidden_TE = hidden_TE + sublayer(index, x_TE, positions_T, context)
                hidden_TE = hidden_TE if parts.norms_first else norm(hidden_TE)
            if parts.norms_first:
                hidden_TE = hidden_TE + layer.feed_forward(layer.feed_forward_norm(hidden_TE))
            else:
                hidden_TE = layer.feed_forward_norm(hidden_TE + layer.feed_forward(hidden_TE))
        return parts.finish(hidden_TE)

    @torch.inference_mode()
    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._parts.head(hidden_RE).float()

    def _attend_to_tokens(
        self, index: int, x_TE: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        attention, kv_cache = self._parts.layers[index].self_attention, context.kv_caches[index]
        metadata, bias_PH = context.metadata[index], self._parts.bias_of_distance_PH[index]
        context.ops.write_kv_cache(
            self._heads(attention.key(x_TE)),
            self._heads(attention.value(x_TE)),
            metadata.slot_mapping_T,
            kv_cache,
        )
        q_THD = self._heads(attention.query(x_TE))
        if bias_PH is None:
            return self._paged(attention, q_THD, kv_cache, metadata, context)
        out_THD = _biased_attention(q_THD, positions_T, kv_cache, metadata, context.ops, bias_PH)
        out_TE: torch.Tensor = attention.output(out_THD.flatten(1))
        return out_TE

    def _attend_to_encoder(
        self, index: int, x_TE: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        attention = self._parts.layers[index].cross_attention
        assert context.encoded is not None
        q_THD = self._heads(attention.query(x_TE))
        kv_cache = context.kv_caches[index]
        return self._paged(attention, q_THD, kv_cache, context.encoded, context)

    def _paged(
        self,
        attention: AttentionWeights,
        q_THD: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        context: ForwardContext,
    ) -> torch.Tensor:
        params = AttentionParams(scale=attention.scale)
        caches = kv_cache.parts
        out_THD = context.ops.paged_attention(q_THD, *caches, metadata, params)
        out_TE: torch.Tensor = attention.output(out_THD.flatten(1))
        return out_TE

    def _heads(self, x_TN: torch.Tensor) -> torch.Tensor:
        return x_TN.view(len(x_TN), self._parts.num_heads, self._parts.head_size)


def _biased_attention(
    q_THD: torch.Tensor,
    positions_T: torch.Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    ops: Operations,
    bias_PH: torch.Tensor,
) -> torch.Tensor:
    """Causal attention, a request at a time, with a bias for each distance and no scale."""
    out_THD = torch.empty_like(q_THD)
    starts = metadata.query_start_loc_R1.tolist()
    for request, length in enumerate(metadata.seq_lens_R.tolist()):
        part = slice(starts[request], starts[request + 1])
        keys_L = torch.arange(length)
        block_L = metadata.block_table_RM[request, keys_L // metadata.block_size].long()
        slots_L = block_L * metadata.block_size + keys_L % metadata.block_size
        k_LHD, v_LHD = (each.to(q_THD.dtype) for each in ops.read_kv_cache(kv_cache, slots_L))
        distance_QL = positions_T[part, None] - keys_L
        scores_HQL = torch.einsum("qhd,lhd->hql", q_THD[part], k_LHD)
        scores_HQL = scores_HQL + bias_PH[distance_QL.clamp(0, len(bias_PH) - 1)].permute(2, 0, 1)
        scores_HQL.masked_fill_(distance_QL < 0, -torch.inf)
        weights_HQL = scores_HQL.float().softmax(-1).to(q_THD.dtype)
        out_THD[part] = torch.einsum("hql,lhd->qhd", weights_HQL, v_LHD)
    return out_THD
