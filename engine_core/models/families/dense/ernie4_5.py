"""ERNIE 4.5: Llama, of which rotary pairs lie side by side, with biases everywhere or nowhere."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.families.dense import llama
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata
from engine_core.models.interleaved_rows import paired_heads

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def read(fields: ConfigFields) -> ModelConfig:
    biased = fields.flag("use_bias", False)
    config = llama.read(
        fields.with_defaults(_DEFAULTS).with_values({"attention_bias": biased, "mlp_bias": biased})
    )
    return replace(config, interleaved=paired_heads(config.spec))


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    return {"hidden_act": "silu", "use_bias": "blk.0.ffn_down.bias" in meta.tensors}


FAMILIES = (
    Family(
        names=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5Model"),
        model_type="ernie4_5",
        read=read,
        gguf=Gguf(architecture="ernie4_5", layer=LLAMA, fields=_gguf_fields),
    ),
)
