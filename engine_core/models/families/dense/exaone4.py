"""EXAONE 4: norms behind attention and feed-forward alone, norms within heads, and maybe windows,
beside which the layers that see everything turn nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.layers.config import RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    head_size_of,
    layer_types_by,
    read_decoder,
    read_layer_types,
    read_window,
    windows_of,
)
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    NORMS_BEHIND,
    PROJECTIONS,
    QK_NORMS,
    Fields,
    Gguf,
    Metadata,
    layer_types,
)
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_PATTERN = 4  # one layer in four sees everything


def read(fields: ConfigFields) -> ModelConfig:
    num_layers, window = fields.positive_int("num_hidden_layers"), read_window(fields, 4096)
    kinds = read_layer_types(fields, num_layers)
    if kinds is None:
        every = 1 if window is None else fields.positive_int("sliding_window_pattern", _PATTERN)
        kinds = layer_types_by(every, num_layers)
    rotary = read_rotary(fields, head_size=head_size_of(fields))
    still = RotaryConfig((0.0,) * len(rotary.inverse_frequencies))
    turns = [window is None or kind == "sliding_attention" for kind in kinds]
    config = read_decoder(
        fields,
        default_max_position=2048,
        default_num_kv_heads=32,
        default_norm_eps=1e-5,
        sliding_windows=windows_of(kinds, window),
        rotary=tuple(rotary if turn else still for turn in turns),
    )
    return replace(config, block=_block)


def _block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer, head_norms=True), norms="behind")


_LAYERS_OF_32B = 64


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    num_layers = config["num_hidden_layers"]
    # llama.cpp has windows in that model alone, whether a file names them or not
    default = 4096 if num_layers == _LAYERS_OF_32B else 0
    window = int(meta.number("attention.sliding_window", default)) or None
    every = _PATTERN if window else 1
    return {
        "hidden_act": "silu",
        "sliding_window": window,
        "layer_types": layer_types(meta, num_layers, every),
    }


FAMILIES = (
    Family(
        names=("Exaone4ForCausalLM", "Exaone4Model", "Exaone4ForSequenceClassification"),
        model_type="exaone4",
        read=read,
        gguf=Gguf(
            architecture="exaone4",
            layer=PROJECTIONS | GATED | QK_NORMS | NORMS_BEHIND,
            fields=_gguf_fields,
        ),
    ),
)
