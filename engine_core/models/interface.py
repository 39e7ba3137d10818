"""What the runner asks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from kernels.interface.operations import ForwardContext, KVCache, Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What the cache and the runner must know of a model.

    Attributes:
        sliding_windows: for each layer, tokens that a query sees, itself included; None for all.
        hidden_size: columns of an embedding; 0 if `forward` takes no given ones.
        max_model_len: tokens that the model was made for.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    sliding_windows: tuple[int | None, ...]
    hidden_size: int
    vocab_size: int
    max_model_len: int


Feature = Literal["adapters", "drafts", "sleep", "stages"]
"""Adapters beside its products; its own first layers or hidden states for drafts; weights that are
given back and exchanged; a part of its layers."""


class Model(Protocol):
    """A decoder-only language model with its weights."""

    @property
    def supports(self) -> frozenset[Feature]:
        """What of it may be asked for; of an option that asks for more see `options.refusals`."""

    @property
    def kv_cache_spec(self) -> KVCacheSpec: ...

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Run one step's tokens (int64 ids in [0, V), int64 positions) -> hidden_TE, or hidden_NE
        where the context names output rows and the model goes by them.

        Keys and values are written to the context's caches; the rows that it gives replace
        embeddings."""

    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result -> logits_RV, final softcap included: float32, or of the
        model's dtype where a device samples by itself."""


@runtime_checkable
class CapturesPasses(Protocol):
    """A model, or a head for drafts, whose captured passes keep the caches that they read."""

    def forget_caches(self) -> None:
        """Let go of them; the next pass is captured anew."""


@runtime_checkable
class EncoderDecoder(Model, Protocol):
    """A model whose tokens also attend to what an encoder made of the request's input."""

    max_encoder_tokens: int
    """Most that an input becomes."""

    def write_encoded(
        self,
        hidden_SE: torch.Tensor,
        slots_S: torch.Tensor,
        kv_caches: Sequence[KVCache],
        ops: Operations,
    ) -> None:
        """Write every layer's keys and values of an encoder's output to the caches."""
