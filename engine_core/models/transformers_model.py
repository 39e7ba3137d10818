"""Models that run through transformers' modelling code: slower than our own, but right.

Two ways, the first that gives the model's own logits is taken:
    paged       the model lets its attention be replaced: all requests at once
    one by one  any causal model: each request alone, its keys and values copied from the paged
                cache into a transformers cache and the new ones back

Which one is right is not taken on trust: before serving, a made-up prompt is run in uneven chunks
and compared with the model's plain forward pass.
"""

import dataclasses
import itertools
import logging
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_core.models.errors import ModelError, UnsupportedArchitecture
from engine_core.models.interface import KVCacheSpec
from engine_core.models.transformers_attention import (
    IMPLEMENTATION,
    AttentionNotPaged,
    attending,
    record_layer_shapes,
    register,
)
from engine_core.models.transformers_check import largest_difference, probe_prompt
from engine_core.models.transformers_head import TransformersHead
from kernels.interface import ForwardContext, Operations

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-3
"""On logits, relative to their spread; float32 stays far below, another computation far above."""
_HALF_PRECISION_TOLERANCE = 5e-2

_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DEFAULT_MAX_MODEL_LEN = 2048


def load_transformers_model(
    path: Path, config: dict[str, Any], *, dtype: torch.dtype, ops: Operations
) -> "TransformersModel":
    """
    Args:
        path: a folder as on the Hugging Face hub.
        config: its config.json.

    Raises:
        UnsupportedArchitecture: transformers does not know it, or it is no decoder with a KV cache.
        ModelError: the files do not fit the architecture.
    """
    names = ", ".join(config.get("architectures") or [str(config.get("model_type"))])
    if config.get("is_encoder_decoder"):
        raise UnsupportedArchitecture(
            f"architecture {names} is an encoder-decoder, only decoder-only models are supported"
        )
    model = _from_pretrained(path, names, dtype)
    probe = probe_prompt(int(model.config.get_text_config().vocab_size))
    with torch.inference_mode():
        expected_TV = model(input_ids=probe[None], use_cache=False).logits[0].float()
        head = TransformersHead(model)
        own_attention = model.config._attn_implementation
        refusals = []
        for make in (_PagedBackbone, _OneByOneBackbone):
            model.set_attn_implementation(own_attention)
            try:
                backbone = make(model, head.backbone, probe, ops)
            except AttentionNotPaged as error:
                refusals.append(f"{make.way}: {error}")
                continue
            candidate = TransformersModel(
                backbone, head, _spec(model.config, backbone.layers, expected_TV.shape[1])
            )
            difference = largest_difference(candidate, probe, expected_TV, ops=ops, dtype=dtype)
            tolerance = _TOLERANCE if dtype == torch.float32 else _HALF_PRECISION_TOLERANCE
            if difference <= tolerance:
                logger.info("%s runs %s through transformers", names, make.way)
                return candidate
            refusals.append(f"{make.way}: logits differ by {difference:.1g} of their spread")
    raise UnsupportedArchitecture(
        f"architecture {names} cannot be run with a paged cache ({'; '.join(refusals)}); "
        "use another model"
    )


def _from_pretrained(path: Path, names: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except ValueError as error:
        raise UnsupportedArchitecture(
            f"architecture {names} is not known to this release of transformers as a causal "
            f"language model: {str(error).splitlines()[0]}"
        ) from error
    except (OSError, RuntimeError, KeyError, ImportError) as error:
        raise ModelError(f"transformers cannot load {path}: {error}") from error
    return model.eval()


class _Backbone(Protocol):
    """The model without its head."""

    way: str
    layers: list["_Layer"]

    def __call__(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None


class TransformersModel:
    """A `Model` (see engine_core.models.interface) made of transformers' modules."""

    def __init__(self, backbone: _Backbone, head: "TransformersHead", spec: KVCacheSpec) -> None:
        self._backbone = backbone
        self._head = head
        self._spec = spec

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return self._spec

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        return self._backbone(token_ids_T, positions_T, context)

    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._head(hidden_RE)


class _PagedBackbone:
    """All requests of a step as one sequence, through paged attention."""

    way = "with paged attention"

    def __init__(self, model: Any, backbone: Any, probe: torch.Tensor, ops: Operations) -> None:
        if not getattr(model, "_supports_attention_backend", False):
            raise AttentionNotPaged("its attention cannot be replaced")
        register()
        model.set_attn_implementation(IMPLEMENTATION)
        self._backbone = backbone
        shapes = record_layer_shapes(backbone, probe)
        if sorted(shapes) != list(range(len(shapes))) or not shapes:
            raise AttentionNotPaged("not all of its layers attend")
        self.layers = [_Layer(*dataclasses.astuple(shapes[layer])) for layer in range(len(shapes))]

    def __call__(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        with attending(context):
            output = self._backbone(
                input_ids=token_ids_T[None], position_ids=positions_T[None], use_cache=False
            )
        hidden_TE: torch.Tensor = output[0][0]
        return hidden_TE


class _OneByOneBackbone:
    """Each request alone, through a transformers cache filled from the paged one."""

    way = "request by request"

    def __init__(self, model: Any, backbone: Any, probe: torch.Tensor, ops: Operations) -> None:
        from transformers import DynamicCache

        self._backbone = backbone
        cache = DynamicCache()
        backbone(input_ids=probe[None], past_key_values=cache, use_cache=True)
        self.layers = []
        for layer in cache.layers:
            keys, values = layer.keys, layer.values
            if keys is None or keys.shape != values.shape or keys.shape[2] != probe.shape[0]:
                raise AttentionNotPaged("its cache does not hold one key and value a token")
            self.layers.append(_Layer(keys.shape[1], keys.shape[1], keys.shape[3]))
        if not self.layers:
            raise AttentionNotPaged("it fills no KV cache")

    def __call__(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        metadata = context.metadata[0]
        starts = metadata.query_start_loc_R1.tolist()
        hidden = [
            self._run_request(
                token_ids_T[start:stop], positions_T[start:stop], context, request, start
            )
            for request, (start, stop) in enumerate(itertools.pairwise(starts))
        ]
        return torch.cat(hidden)

    def _run_request(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        request: int,
        start: int,
    ) -> torch.Tensor:
        from transformers import DynamicCache

        metadata = context.metadata[0]
        num_new = token_ids.shape[0]
        seq_len = int(metadata.seq_lens_R[request])
        num_computed = seq_len - num_new
        num_blocks = -(-seq_len // metadata.block_size)
        blocks = metadata.block_table_RM[request, :num_blocks].long()
        cache = DynamicCache()
        for layer, (k_cache, v_cache) in enumerate(context.kv_caches):
            if num_computed:
                past = [
                    each[blocks].flatten(0, 1)[:num_computed].transpose(0, 1)[None]
                    for each in (k_cache, v_cache)
                ]
                cache.update(*past, layer)
        output = self._backbone(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, seq_len, dtype=torch.int64),
            past_key_values=cache,
            use_cache=True,
        )
        slots = metadata.slot_mapping_T[start : start + num_new]
        for layer, kv_cache in zip(cache.layers, context.kv_caches, strict=True):
            context.ops.write_kv_cache(
                layer.keys[0, :, -num_new:].transpose(0, 1),
                layer.values[0, :, -num_new:].transpose(0, 1),
                kv_cache=kv_cache,
                slot_mapping_T=slots,
            )
        hidden_TE: torch.Tensor = output[0][0]
        return hidden_TE


def _spec(config: Any, layers: list[_Layer], vocab_size: int) -> KVCacheSpec:
    shapes = {(layer.num_query_heads, layer.num_kv_heads, layer.head_size) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedArchitecture(
            f"its layers' caches differ in shape ({sorted(shapes)}); use another model"
        )
    ((num_query_heads, num_kv_heads, head_size),) = shapes
    text_config = config.get_text_config()
    limits = [getattr(text_config, name, None) for name in _POSITION_LIMITS]
    return KVCacheSpec(
        num_layers=len(layers),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        sliding_windows=tuple(layer.sliding_window for layer in layers),
        vocab_size=vocab_size,
        max_model_len=next((int(limit) for limit in limits if limit), _DEFAULT_MAX_MODEL_LEN),
    )
