"""Paged attention as one of transformers' attention implementations.

transformers lets a model call any registered function instead of its own attention
(`AttentionInterface`). Ours writes keys and values to the cache and reads them through block
tables, so the tokens of all requests run as one sequence. Owns that registration and what a model
hands over; must not know how a model is loaded.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from kernels.interface import ForwardContext

IMPLEMENTATION = "engine_core_paged"

_UNDERSTOOD = {"sliding_window", "softcap", "scaling", "dropout", "position_ids", "is_causal"}
"""Keyword arguments that are honoured, or that change nothing here. Any other that is not None
may change the result, and is refused."""

_HARMLESS = {
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "cache_position",
    "training",
    "past_key_values",
    "return_dict",
    "position_embeddings",
    "logits_to_keep",
}


class AttentionNotPaged(Exception):
    """The model's attention does something that paged attention does not."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer's attention looks like. Sizes as in the kernels' interface."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None


@dataclasses.dataclass(slots=True)
class _Recording:
    shapes: dict[int, LayerShape]


_active: ForwardContext | _Recording | None = None


@contextlib.contextmanager
def attending(context: ForwardContext | _Recording) -> Iterator[None]:
    """Attention of models run inside goes through `context`. One model at a time."""
    global _active
    assert _active is None, "two models run at once"
    _active = context
    try:
        yield
    finally:
        _active = None


def record_layer_shapes(model: Any, token_ids_T: torch.Tensor) -> dict[int, LayerShape]:
    """Run a model once, without a cache, to see what its layers hand to attention.

    Raises:
        AttentionNotPaged: something that paged attention does not do.
    """
    recording = _Recording({})
    with attending(recording):
        model(
            input_ids=token_ids_T[None],
            position_ids=torch.arange(token_ids_T.shape[0])[None],
            use_cache=False,
        )
    return recording.shapes


def register() -> None:
    """Make the implementation known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _paged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Causality and windows come from the block tables' metadata."""


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise AttentionNotPaged("its layers do not say their index")
    if attention_mask is not None:
        raise AttentionNotPaged("it brings an attention mask of its own")
    if query.shape[0] != 1 or key.shape != value.shape or query.shape[2] != key.shape[2]:
        raise AttentionNotPaged("its queries, keys and values differ in shape")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise AttentionNotPaged("it is not causal")
    for name, option in options.items():
        if option is not None and name not in _UNDERSTOOD and name not in _HARMLESS:
            raise AttentionNotPaged(f"it uses {name}")
    sliding_window: int | None = options.get("sliding_window")
    if isinstance(_active, _Recording):
        _active.shapes[layer] = LayerShape(
            query.shape[1], key.shape[1], query.shape[3], sliding_window
        )
        return query.transpose(1, 2).contiguous(), None
    context = _active
    assert context is not None, "the model ran outside of a step"
    kv_cache, metadata = context.kv_caches[layer], context.metadata[layer]
    context.ops.write_kv_cache(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        kv_cache=kv_cache,
        slot_mapping_T=metadata.slot_mapping_T,
    )
    out_THD = context.ops.paged_attention(
        query[0].transpose(0, 1),
        kv_cache[0],
        kv_cache[1],
        metadata,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=options.get("softcap"),
    )
    return out_THD[None], None
