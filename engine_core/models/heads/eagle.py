"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): one layer that guesses what its target says next,
from the target's hidden states."""

from collections.abc import Sequence
from functools import partial

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import CopyWeight, Placement, Placements, merge
from engine_core.layers.vocabulary import Vocabulary
from engine_core.models.blocks.block import Begun, BlockBuilder
from engine_core.models.decoder import Decoder
from engine_core.models.heads.eagle_config import EagleConfig
from engine_core.models.heads.head import DraftHead
from kernels.interface.operations import ForwardContext, Operations

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_OFFSETS = "model.d2t"


class EagleHead(DraftHead):
    """The published formula:

        h      = fc(states of some of the target's layers, side by side)     or its own
        x      = norm(embedding(token i + 1)) || hidden_norm(h)              [T, 2 E]
        h      = h + attention(x);  h = h + feed_forward(norm(h))
        logits = lm_head(norm(h)), of a part of the vocabulary

    Keys and values are a function of x alone, so what is only to be remembered costs half a layer.

    Args:
        names: of the checkpoint's tensors. Where the head has the target's hidden size and
            vocabulary, it may lack an embedding or lm_head: it takes the target's.
        num_positions: see `BlockBuilder`.
    """

    def __init__(
        self,
        config: EagleConfig,
        target: Decoder,
        *,
        names: frozenset[str],
        dtype: torch.dtype,
        ops: Operations,
        num_positions: int,
    ) -> None:
        layer, num_states = config.layer, len(config.state_layers)
        build = BlockBuilder(layer, dtype=dtype, ops=ops, num_positions=num_positions)
        self._config = config
        linear = partial(FusedLinear, bias=False, dtype=dtype, ops=ops)
        norm = partial(build.norm, size=config.target_hidden_size)
        self._state_norms: list[RMSNorm] = []
        if config.fc_norm:
            self._state_norms = [norm(f"model.fc_norm.{number}") for number in range(num_states)]
        inputs = num_states * config.target_hidden_size
        self._states_norm = (
            build.norm("model.input_norm", inputs) if config.norm_before_fc else None
        )
        self._combine = linear([("model.fc", layer.spec.hidden_size)], inputs)
        self._hidden_norm = build.norm("model.layers.0.hidden_norm")
        self._attention = build.attention(0, num_inputs=2 * layer.spec.hidden_size)
        self._feed_forward_norm = build.norm("model.layers.0.post_attention_layernorm")
        self._feed_forward = build.feed_forward(0)
        self._final_norm = build.norm("model.norm")
        self._embedding: Vocabulary | None = None
        is_alike = layer.spec.hidden_size == config.target_hidden_size
        if _EMBEDDING in names or not is_alike:
            self._embedding = Vocabulary(
                embedding_name=_EMBEDDING,
                head_name=_EMBEDDING,
                vocab_size=layer.spec.vocab_size,
                hidden_size=layer.spec.hidden_size,
                tied=True,
                embedding_scale=None,
                softcap=None,
                dtype=dtype,
                ops=ops,
            )
        self._is_part = config.draft_vocab_size != layer.spec.vocab_size
        self._lm_head: FusedLinear | None = None
        if _LM_HEAD in names or self._is_part or not (is_alike or layer.tied_head):
            self._lm_head = linear([("lm_head", config.draft_vocab_size)], layer.spec.hidden_size)
        vocabulary = self._embedding or target.vocabulary
        self._outputs = vocabulary if layer.tied_head else target.vocabulary
        self._has_offsets = self._is_part or _OFFSETS in names
        self._token_ids = torch.arange(config.draft_vocab_size, device=ops.device)
        """[tokens that it can guess]"""
        super().__init__(
            build,
            config.state_layers,
            vocabulary=vocabulary,
            embedding_norm=build.norm("model.layers.0.input_layernorm"),
            passes_normed=config.norm_output,
        )

    def placements(self) -> Placements:
        norms = [self._embedding_norm, self._hidden_norm, self._feed_forward_norm]
        norms += [self._final_norm, *self._state_norms]
        if self._states_norm is not None:
            norms.append(self._states_norm)
        parts = [norm.placements() for norm in norms]
        parts += [self._combine.placements(), self._attention.placements()]
        parts.append(self._feed_forward.placements())
        parts += [part.placements() for part in (self._embedding, self._lm_head) if part]
        if self._has_offsets:
            parts.append({_OFFSETS: Placement(tuple(self._token_ids.shape), self._store_offsets)})
        return merge(parts)

    def _store_offsets(self, offsets: torch.Tensor, _copy: CopyWeight) -> None:
        self._token_ids += offsets.to(self._token_ids)
        self._is_part |= bool(offsets.any())

    def finish_loading(self) -> None:
        """Once every tensor has come. Raises ValueError: it guesses what are no tokens."""
        if self._embedding is not None:
            self._embedding.finish_loading()
        lowest, highest = int(self._token_ids.min()), int(self._token_ids.max())
        size = self.spec.vocab_size
        if lowest < 0 or highest >= size:
            raise ValueError(
                f"tensor d2t leads to tokens from {lowest} to {highest}, the vocabulary has {size}"
            )

    def combine(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._state_norms:
            states = [norm(x) for norm, x in zip(self._state_norms, states, strict=True)]
        x_TE = torch.cat([*states], -1)
        return self._combine(x_TE if self._states_norm is None else self._states_norm(x_TE))

    def _begin(
        self,
        normed_TE: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[Begun, torch.Tensor]:
        x_TE = self._hidden_norm(hidden_TE)
        residual_TE = x_TE if self._config.norm_before_residual else hidden_TE
        both_TE = torch.cat([normed_TE, x_TE], 1)
        return self._attention.begin(both_TE, positions_T, context), residual_TE

    def _finish(
        self, begun: Begun, residual_RE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_RE = self._attention.finish(begun, context)
        x_RE, residual_RE = self._feed_forward_norm.add(out_RE, residual_RE)
        return self._final_norm.add(self._feed_forward(x_RE, context), residual_RE)

    def _logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        if self._lm_head is None:
            return self._outputs.logits(x_RE)
        logits_RD = self._lm_head(x_RE).float()
        if not self._is_part:
            return logits_RD
        size = self.spec.vocab_size
        logits_RV = logits_RD.new_full((len(logits_RD), size), float("-inf"))
        logits_RV[:, self._token_ids] = logits_RD
        return logits_RV
