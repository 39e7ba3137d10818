"""Llama, and what shares its code: biases by option, no window."""

from dataclasses import replace

from engine_core.layers.config import RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata


def read(fields: ConfigFields, rotary: RotaryConfig | None = None) -> ModelConfig:
    """`rotary`: the angles; None: those of the config."""
    biased = fields.flag("attention_bias", False)
    angles = None if rotary is None else (rotary,) * fields.positive_int("num_hidden_layers")
    return replace(
        read_decoder(fields, default_max_position=2048, rotary=angles),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in meta.tensors,
    }


FAMILIES = (
    Family(
        names=("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"),
        model_type="llama",
        read=read,
        gguf=Gguf(architecture="llama", layer=LLAMA, fields=gguf_fields, pairs_rows=True),
    ),
)
