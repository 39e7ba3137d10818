"""What heads for drafts share: one layer that guesses what its target says next, from the target's
hidden states."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import Placements
from engine_core.layers.rotary import RotaryTable
from engine_core.layers.vocabulary import Vocabulary
from engine_core.models.blocks.block import Begun, BlockBuilder
from engine_core.models.interface import ModelSpec
from kernels.interface.operations import ForwardContext, Operations
from kernels.interface.special_inputs import GivenRows


class DraftHead(ABC):
    """At position i it takes token i + 1 and the target's states of token i, and guesses token
    i + 2; where the target has not been, its own hidden state of token i. Two passes: `remember`
    writes keys and values, `guess` is only for positions whose next token is wanted.

    Args:
        build: of the head's one layer.
        state_layers: of the target, see `Decoder.keep_states`.
        embedding_norm: on the embedding of the next token.
        passes_normed: the next pass takes the hidden state behind the last norm.
    """

    def __init__(
        self,
        build: BlockBuilder,
        state_layers: tuple[int, ...],
        *,
        vocabulary: Vocabulary,
        embedding_norm: RMSNorm,
        passes_normed: bool,
    ) -> None:
        self.spec: ModelSpec = build.config.spec
        self.state_layers = state_layers
        self._ops: Operations = build.ops
        self._vocabulary = vocabulary
        self._embedding_norm = embedding_norm
        self._passes_normed = passes_normed
        tables = build.tables.values() if build.grows_tables else ()
        self._tables = [table for table in tables if isinstance(table, RotaryTable)]
        self._num_positions: list[int] = []
        """Positions of each table when the pass was captured."""
        self._heads = self.spec.num_query_heads, self.spec.keys_of(0).key_size
        self._given: list[torch.Tensor] = []
        """[capacity, N] each: where a captured guess finds what it is given."""
        self.forget_caches()

    @abstractmethod
    def placements(self) -> Placements:
        """Every tensor that the head takes, by checkpoint name with "model." before it."""

    def forget_caches(self) -> None:
        """Capture both passes anew: what was captured keeps the caches that it read."""
        self._compute_keys = self._ops.capture(self._keys)
        self._compute_guess = self._ops.capture(self._guess)

    @abstractmethod
    def combine(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's states [T, target's E] of `state_layers` -> [T, E]."""

    @abstractmethod
    def _begin(
        self,
        normed_TE: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[Begun, torch.Tensor]:
        """Embeddings of next tokens, normed, and hidden states -> (what the layer's mixer has
        begun, queries first; the residual stream). Recorded, see `Operations.capture`."""

    @abstractmethod
    def _finish(
        self, begun: Begun, residual_RE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of `_begin` -> (hidden state behind the last norm, and before it). Recorded."""

    @abstractmethod
    def _logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        """Hidden states behind the last norm -> logits_RV."""

    def remember(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, ...]:
        """Write keys and values of positions. Returns what `guess` takes, tensors [T, N].

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
        return self._compute_keys(token_ids_T, positions_T, context)

    def _keys(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, ...]:
        """What `remember` consists of; `Operations.capture` says what it may do."""
        embedded_TE = self._vocabulary.embed(token_ids_T)
        normed_TE = self._embedding_norm(embedded_TE)
        hidden_TE = self._ops.replace_rows(embedded_TE, context.given)  # all of them
        begun, residual_TE = self._begin(normed_TE, hidden_TE, positions_T, context)
        parts = begun if isinstance(begun, tuple) else (begun,)
        return *(part.contiguous().flatten(1) for part in parts), residual_TE

    def guess(
        self, rows: Sequence[torch.Tensor], context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of `remember`'s tensors -> (logits_RV in float32, minus infinity where it cannot
        guess; its hidden state [R, E])."""
        num_rows = len(rows[0])
        if not self._given or num_rows > len(self._given[0]):
            capacity = 1 << (num_rows - 1).bit_length()
            self._given = [part.new_empty(capacity, part.shape[1]) for part in rows]
            self._compute_guess = self._ops.capture(self._guess)
        for given, part in zip(self._given, rows, strict=True):
            given[:num_rows] = part
        rows_R = torch.arange(num_rows, device=rows[0].device)
        x_RE, residual_RE = self._compute_guess(rows_R, rows_R, context)
        return self._logits(x_RE), x_RE if self._passes_normed else residual_RE

    def _guess(
        self, rows_R: torch.Tensor, _positions_R: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, ...]:
        """What `guess` consists of (see `Operations.capture`); `rows_R`: of what it is given."""
        q_RN, *parts, residual_RE = (self._ops.embedding(rows_R, given) for given in self._given)
        q_RHD = q_RN.view(-1, *self._heads)
        return self._finish((q_RHD, *parts) if parts else q_RHD, residual_RE, context)
