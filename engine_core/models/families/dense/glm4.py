"""GLM-4 and GLM-Z1: half of a head turns, by pairs that lie side by side, gate and up are one
tensor; from 0414 on norms behind attention and feed-forward, too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.layers.config import InterleavedRows
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import PROJECTIONS, TWO_NORMS, Fields, Gguf, Metadata
from engine_core.models.interface import ModelSpec
from engine_core.models.interleaved_rows import paired_heads
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def read_glm(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    rotary = read_rotary(fields, head_size=head_size_of(fields), turns_a_part=True)
    config = read_decoder(
        fields,
        default_max_position=131_072,
        rotary=(rotary,) * fields.positive_int("num_hidden_layers"),
    )
    halves = [(f"mlp.{half}_proj", (config.intermediate_size,)) for half in ("gate", "up")]
    turning = 2 * len(rotary.inverse_frequencies)
    return replace(
        config,
        qkv_bias=fields.flag("attention_bias", True),
        interleaved=(
            *paired_heads(config.spec, turning),
            _fused(config.spec, turning),
            InterleavedRows("mlp.gate_up_proj", 1, tuple(halves)),
        ),
    )


def _fused(spec: ModelSpec, turning: int) -> InterleavedRows:
    """q, k and v in one tensor, as files of the first GLM-4 have them."""
    parts = [part for rows in paired_heads(spec, turning) for part in rows.parts]
    keys, pairs = spec.keys_of(0), range(0, sum(len(pieces) for _, pieces in parts), 2)
    values = ("self_attn.v_proj", (keys.num_kv_heads * keys.value_size,))
    return InterleavedRows("self_attn.qkv_proj", 1, (*parts, values), tuple(pairs))


def read(fields: ConfigFields) -> ModelConfig:
    return replace(read_glm(fields), block=_block)


def _block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer), norms="around")


_FEED_FORWARD = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_NORMS_BEHIND = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    if meta.values("rope.dimension_sections", None) is not None:
        meta.refuse("positions of several axes")
    return {
        "hidden_act": "silu",
        "attention_bias": any(f"blk.0.attn_{q}.bias" in meta.tensors for q in ("q", "qkv")),
        "partial_rotary_factor": config["rope_parameters"].get("partial_rotary_factor", 1.0),
    }


FAMILIES = (
    Family(
        names=("Glm4ForCausalLM", "Glm4Model", "Glm4ForSequenceClassification"),
        model_type="glm4",
        read=read,
        tensor_suffixes=(
            ("post_attention_layernorm.weight", "pre_feedforward_layernorm.weight"),
            ("post_self_attn_layernorm.weight", "post_attention_layernorm.weight"),
            ("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"),
        ),
        gguf=Gguf(
            architecture="glm4",
            layer=PROJECTIONS | TWO_NORMS | _FEED_FORWARD | _NORMS_BEHIND,
            fields=_gguf_fields,
            turns_a_part=True,
            biases_output=False,
        ),
    ),
    Family(
        names=("GlmForCausalLM", "GlmModel", "GlmForSequenceClassification"),
        model_type="glm",
        read=read_glm,
        gguf=Gguf(
            architecture="chatglm",
            layer=PROJECTIONS | TWO_NORMS | _FEED_FORWARD | {"attn_qkv": "self_attn.qkv_proj"},
            fields=_gguf_fields,
            turns_a_part=True,
            biases_output=False,
        ),
    ),
)
