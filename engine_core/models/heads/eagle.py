"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): one layer that guesses what its target says next,
from the target's hidden states."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import CopyWeight, Placement, Placements, merge
from engine_core.layers.rotary import RotaryTable
from engine_core.layers.vocabulary import Vocabulary
from engine_core.models.blocks import BlockBuilder
from engine_core.models.decoder import Decoder
from engine_core.models.heads.eagle_config import EagleConfig
from engine_core.models.interface import ModelSpec
from kernels.interface.given_rows import GivenRows
from kernels.interface.operations import ForwardContext, Operations

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_OFFSETS = "model.d2t"


class EagleHead:
    """At position i it takes token i + 1 and the target's states of token i, and guesses token
    i + 2; where the target has not been, its own hidden state of token i:

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
        self.spec: ModelSpec = layer.spec
        self.state_layers = config.state_layers
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
        self._embedding_norm = build.norm("model.layers.0.input_layernorm")
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
        self._vocabulary = self._embedding or target.vocabulary
        self._is_part = config.draft_vocab_size != layer.spec.vocab_size
        self._lm_head: FusedLinear | None = None
        if _LM_HEAD in names or self._is_part or not (is_alike or layer.tied_head):
            self._lm_head = linear([("lm_head", config.draft_vocab_size)], layer.spec.hidden_size)
        self._outputs = self._vocabulary if layer.tied_head else target.vocabulary
        self._has_offsets = self._is_part or _OFFSETS in names
        self._token_ids = torch.arange(config.draft_vocab_size, device=ops.device)
        """[tokens that it can guess]"""
        self._tables = [table for table in build.tables.values() if isinstance(table, RotaryTable)]
        self._ops = ops
        self._compute_keys = ops.capture(self._keys)
        self._compute_guess = ops.capture(self._guess)
        self._num_positions: list[int] = []
        """Positions of each table when the pass was captured."""
        heads = (layer.spec.num_query_heads, layer.spec.keys_of(0).key_size)
        self._heads = heads
        self._queries = torch.empty(0, math.prod(heads), dtype=dtype, device=ops.device)
        self._residual = torch.empty(0, layer.spec.hidden_size, dtype=dtype, device=ops.device)
        """[capacity, ...]: where a captured guess finds what it is given."""

    def placements(self) -> Placements:
        """Every tensor that the head takes, by checkpoint name with "model." before it."""
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
        self._token_ids += offsets.to(torch.int64)
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

    def forget_caches(self) -> None:
        """Capture both passes anew: what was captured keeps the caches that it read."""
        self._compute_keys = self._ops.capture(self._keys)
        self._compute_guess = self._ops.capture(self._guess)

    def combine(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's states [T, target's E] of `state_layers` -> [T, E]."""
        if self._state_norms:
            states = [norm(x) for norm, x in zip(self._state_norms, states, strict=True)]
        x_TE = torch.cat([*states], -1)
        return self._combine(x_TE if self._states_norm is None else self._states_norm(x_TE))

    def remember(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of positions. Returns what `guess` takes: queries [T, H * D] and
        the residual stream [T, E].

        `token_ids_T`: int64, of each the token behind its position."""
        if len(positions_T):
            for table in self._tables:
                table.cover(int(positions_T.max()) + 1)
        sizes = [len(table.cos_sin_PD) for table in self._tables]
        if sizes != self._num_positions:
            self._num_positions = sizes
            self._compute_keys = self._ops.capture(self._keys)  # which keeps addresses
        places_T = torch.arange(len(hidden_TE), device=hidden_TE.device)
        given = GivenRows(places_T, hidden_TE.contiguous())
        context = dataclasses.replace(context, given=given)
        queries_TN, residual_TE = self._compute_keys(token_ids_T, positions_T, context)
        return queries_TN, residual_TE

    def _keys(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, ...]:
        """What `remember` consists of; `Operations.capture` says what it may do."""
        embedded_TE = self._vocabulary.embed(token_ids_T)
        normed_TE = self._embedding_norm(embedded_TE)
        hidden_TE = self._ops.replace_rows(embedded_TE, context.given)  # all of them
        x_TE = self._hidden_norm(hidden_TE)
        residual_TE = x_TE if self._config.norm_before_residual else hidden_TE
        both_TE = torch.cat([normed_TE, x_TE], 1)
        q_THD = self._attention.begin(both_TE, positions_T, context)
        return q_THD.contiguous().flatten(1), residual_TE

    def guess(
        self, q_RN: torch.Tensor, residual_RE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits_RV in float32, minus infinity where it cannot guess; its hidden state [R, E])."""
        num_rows = len(q_RN)
        if num_rows > len(self._queries):
            capacity = 1 << (num_rows - 1).bit_length()
            self._queries = self._queries.new_empty(capacity, self._queries.shape[1])
            self._residual = self._residual.new_empty(capacity, self._residual.shape[1])
            self._compute_guess = self._ops.capture(self._guess)
        self._queries[:num_rows] = q_RN
        self._residual[:num_rows] = residual_RE
        rows_R = torch.arange(num_rows, device=q_RN.device)
        x_RE, residual_RE = self._compute_guess(rows_R, rows_R, context)
        logits_RV = self._logits(x_RE)
        return logits_RV, x_RE if self._config.norm_output else residual_RE

    def _guess(
        self, rows_R: torch.Tensor, _positions_R: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, ...]:
        """What `guess` consists of (see `Operations.capture`); `rows_R`: of what it is given."""
        q_RHD = self._ops.embedding(rows_R, self._queries).view(-1, *self._heads)
        residual_RE = self._ops.embedding(rows_R, self._residual)
        out_RE = self._attention.finish(q_RHD, context)
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
