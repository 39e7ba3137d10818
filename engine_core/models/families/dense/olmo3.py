"""OLMo 3: OLMo 2 with windows in three layers of four, whose angles are never scaled."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    head_size_of,
    layer_types_of,
    read_decoder,
    read_window,
    windows_of,
)
from engine_core.models.families.dense import olmo2
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata, layer_types
from engine_core.models.rotary_config import read_rotary_by_layer_type

_PATTERN = 4  # one layer in four sees everything
_THETA = 500_000.0


def read(fields: ConfigFields) -> ModelConfig:
    num_layers = fields.positive_int("num_hidden_layers")
    kinds = layer_types_of(fields, num_layers, _PATTERN)
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=head_size_of(fields),
        full_theta=fields.positive_float("rope_theta", _THETA),
        sliding_theta=_THETA,
    )
    config = read_decoder(
        fields,
        default_max_position=2048,
        default_norm_eps=1e-5,
        sliding_windows=windows_of(kinds, read_window(fields, 4096)),
        rotary=tuple(rotary[kind] for kind in kinds),
    )
    biased = fields.flag("attention_bias", False)
    return replace(
        config,
        qkv_bias=biased,
        output_bias=biased,
        norms_in_float32=True,
        can_be_shared=False,
        block=olmo2.block,
    )


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    full = config["rope_parameters"]
    theta = float(meta.number("rope.freq_base_swa", full["rope_theta"]))
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "sliding_window": int(meta.number("attention.sliding_window")),
        "layer_types": layer_types(meta, config["num_hidden_layers"], _PATTERN),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


FAMILIES = (
    Family(
        names=("Olmo3ForCausalLM", "Olmo3Model", "Olmo3ForSequenceClassification"),
        model_type="olmo3",
        read=read,
        gguf=Gguf(
            architecture="olmo2",
            layer=olmo2.GGUF_LAYER,
            fields=_gguf_fields,
            is_of=lambda meta: meta.number("attention.sliding_window", 0) > 0,
        ),
    ),
)
