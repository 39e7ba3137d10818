"""Command R7B and A (Cohere 2): attention and feed-forward side by side behind one layer norm;
layers with windows turn, by pairs that lie side by side, and the others do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.layers.config import RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    head_size_of,
    layer_types_of,
    read_decoder,
    read_window,
    windows_of,
)
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    PROJECTIONS,
    Fields,
    Gguf,
    Metadata,
    layer_types,
)
from engine_core.models.interleaved_rows import paired_heads
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_PATTERN = 4  # one layer in four sees everything


def read(fields: ConfigFields) -> ModelConfig:
    num_layers = fields.positive_int("num_hidden_layers")
    every = fields.positive_int("sliding_window_pattern", _PATTERN)
    kinds = layer_types_of(fields, num_layers, every)
    rotary = read_rotary(fields, head_size=head_size_of(fields))
    still = RotaryConfig((0.0,) * len(rotary.inverse_frequencies))
    config = read_decoder(
        fields,
        default_max_position=8192,
        default_tied=True,
        sliding_windows=windows_of(kinds, read_window(fields, 4096)),
        rotary=tuple(rotary if kind == "sliding_attention" else still for kind in kinds),
    )
    biased = fields.flag("attention_bias", False)
    return replace(
        config,
        norm_eps=fields.positive_float("layer_norm_eps", 1e-5),
        norm_bias=False,
        qkv_bias=biased,
        output_bias=biased,
        logits_divisor=1.0 / fields.positive_float("logit_scale", 0.0625),
        interleaved=paired_heads(config.spec),
        block=_block,
    )


def _block(build: BlockBuilder, layer: int) -> Block:
    from engine_core.models.blocks.mixers import ParallelMixer

    both = ParallelMixer(build.attention(layer), build.feed_forward(layer))
    return build.part_alone(layer, both, "input_layernorm")


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "layer_norm_eps": config["rms_norm_eps"],
        "logit_scale": float(meta.number("logit_scale")),
        "sliding_window": int(meta.number("attention.sliding_window")),
        "layer_types": layer_types(meta, config["num_hidden_layers"], _PATTERN),
    }


FAMILIES = (
    Family(
        names=("Cohere2ForCausalLM", "Cohere2Model"),
        model_type="cohere2",
        read=read,
        gguf=Gguf(
            architecture="cohere2",
            layer=PROJECTIONS | GATED | {"attn_norm": "input_layernorm"},
            fields=_gguf_fields,
            scales=frozenset({"logit_scale"}),
            norm_eps="attention.layer_norm_epsilon",
        ),
    ),
)
