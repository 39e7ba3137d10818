"""The interface of a model: what the runner asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from engine_core.models.layer_cache import LayerCache, PagedKeys

if TYPE_CHECKING:
    import torch

    from kernels.interface.kv_cache import KVCache
    from kernels.interface.operations import ForwardContext, Operations
    from kernels.interface.weights import WeightPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the cache and the runner must know of a model.

    Attributes:
        layers: what each layer keeps.
        hidden_size: columns of an embedding; 0 if `forward` takes no given ones.
        max_model_len: tokens that the model was made for.
    """

    layers: tuple[LayerCache, ...]
    num_query_heads: int
    hidden_size: int
    vocab_size: int
    max_model_len: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """What all layers keep, in order: of most layers one cache, see `LayerCache.parts`."""
        return tuple([part for layer in self.layers for part in layer.parts])

    def places(self, layers: range) -> range:
        """The part of `caches` that these layers have, of layers that follow one another."""
        start, stop = (
            sum(len(layer.parts) for layer in self.layers[:number])
            for number in (layers.start, layers.stop)
        )
        return range(start, stop)

    def keys_of(self, layer: int) -> PagedKeys:
        """The keys of a layer that keeps keys and values, or reads another's."""
        keys = self.layers[layer]
        assert isinstance(keys, PagedKeys), f"layer {layer} keeps {keys}"
        return keys

    @property
    def query_width(self) -> int:
        """Columns of a layer's queries, of the widest one; the hidden state's if none has keys."""
        sizes = [layer.key_size for layer in self.layers if isinstance(layer, PagedKeys)]
        return self.num_query_heads * max(sizes) if sizes else self.hidden_size


Feature = Literal["adapters", "drafts", "prompt_embeds", "sleep", "stages"]
"""Adapters beside its products; its own first layers or hidden states for drafts; hidden states in
place of tokens; weights that are given back and exchanged; a part of its layers."""


ProductsOf = Callable[[str, "WeightPart"], Iterable[tuple[str, "WeightPart"]]]
"""A tensor of a checkpoint, by its name there -> its rows by the model's names."""


class Model(Protocol):
    """A decoder-only language model with its weights."""

    @property
    def supports(self) -> frozenset[Feature]:
        """What of it may be asked for; of an option that asks for more see `options.refusals`."""

    @property
    def spec(self) -> ModelSpec: ...

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
