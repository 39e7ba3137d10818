"""Gemma 4's text model: sizes and number of key heads by layer type, values with a norm, keys that
are values, layers that read another's keys, experts beside the feed-forward, a number on each
layer's output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.expert_tensors import GEMMA_EXPERTS
from engine_core.models.families.family import Family
from engine_core.models.families.gemma_gguf import (
    BY_LAYER,
    GEMMA_EXPERT_LAYER,
    GEMMA_LAYER,
    IN_PLACE,
    PER_LAYER_TOP,
    gemma4_fields,
)
from engine_core.models.families.gguf import Gguf
from engine_core.models.gemma_config import (
    FULL,
    SLIDING,
    halves_of,
    layer_kinds,
    read_gemma_experts,
    read_keys,
    read_per_layer,
    sharing,
    unused,
)
from engine_core.models.rotary_config import read_rotary_by_layer_type

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_ROTARY = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": _THETA},
    SLIDING: {"rope_type": "default", "rope_theta": _LOCAL_THETA},
}
_LEFT_OUT = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "vocab_size": 262_144,
}


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_LEFT_OUT)
    if fields.get("use_bidirectional_attention") == "all":
        raise UnsupportedArchitecture('use_bidirectional_attention "all" is not supported')
    if fields.get("rope_parameters") is None:
        fields = fields.with_values({"rope_parameters": _ROTARY})
    num_layers = fields.positive_int("num_hidden_layers")
    kinds = layer_kinds(fields, num_layers)
    keys = sharing(read_keys(fields, kinds), kinds, fields.get("num_kv_shared_layers") or 0)
    own = [kept.shares is None for kept in keys]
    sizes = {kind: kept.key_size for kind, kept in zip(kinds, keys, strict=True)}
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=sizes.get(SLIDING, sizes[FULL]),
        full_head_size=sizes[FULL],
        full_theta=_THETA,
        sliding_theta=_LOCAL_THETA,
    )
    config = read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=4,
        default_head_size=256,
        default_tied=True,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        rotary=tuple(rotary[kind] for kind in kinds),
        experts=read_gemma_experts(fields, num_layers),
    )
    for kept in keys:
        if config.spec.num_query_heads % kept.num_kv_heads:
            raise ModelConfigError(
                f"config: {config.spec.num_query_heads} attention heads cannot share "
                f"{kept.num_kv_heads} key/value heads"
            )
    softcap, biased = fields.get("final_logit_softcapping"), fields.flag("attention_bias", False)
    are_values = fields.flag("attention_k_eq_v", False)
    wide = fields.flag("use_double_wide_mlp", False)
    widths = tuple(config.intermediate_size * (1 if each or not wide else 2) for each in own)
    per_layer = read_per_layer(fields)
    return replace(
        config,
        spec=replace(config.spec, layers=keys),
        attention_scale=1.0,
        qkv_bias=biased,
        output_bias=biased,
        norms_in_float32=True,
        embedding_scale=config.spec.hidden_size**0.5,
        final_softcap=None if softcap is None else fields.positive_float("final_logit_softcapping"),
        can_be_shared=len({*widths}) == 1 and per_layer is None and config.experts[0] is None,
        per_layer=per_layer,
        lacks=frozenset({"prompt_embeds"}) if per_layer else frozenset(),
        interleaved=halves_of(config.experts[0]),
        block=_Block(tuple(are_values and kind == FULL for kind in kinds), widths),
        unused=unused(own),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Attention and a feed-forward. Of each layer: whether keys are values, features."""

    keys_are_values: tuple[bool, ...]
    widths: tuple[int, ...]

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        from engine_core.models.blocks.gemma import scaled_block

        attention = build.attention(
            layer,
            head_norms=True,
            norms_values=True,
            keys_are_values=self.keys_are_values[layer],
        )
        width = build.config.intermediate_size if build.config.can_be_shared else self.widths[layer]
        return scaled_block(build, layer, attention, width)


FAMILIES = (
    Family(
        names=("Gemma4ForCausalLM", "Gemma4TextModel"),
        model_type="gemma4_text",
        read=read,
        experts=GEMMA_EXPERTS,
        gguf=Gguf(
            architecture="gemma4",
            layer=GEMMA_LAYER | GEMMA_EXPERT_LAYER | {"layer_output_scale.weight": "layer_scalar"},
            fields=gemma4_fields,
            theta=_THETA,
            by_layer=BY_LAYER,
            read_tensors=frozenset({"rope_freqs.weight"}),
            top=PER_LAYER_TOP,
            in_place=IN_PLACE,
        ),
    ),
)
