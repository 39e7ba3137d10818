"""Qwen 2 and 2.5: biases on q, k and v only."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_qwen_windows
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    config = read_decoder(
        fields,
        default_max_position=32_768,
        default_num_kv_heads=32,
        sliding_windows=read_qwen_windows(fields),
    )
    return replace(config, qkv_bias=True)


def _gguf_fields(_meta: Metadata, _config: Fields) -> Fields:
    return {"hidden_act": "silu", "use_sliding_window": False}


FAMILIES = (
    Family(
        names=(
            "Qwen2ForCausalLM",
            "Qwen2Model",
            "Qwen2ForSequenceClassification",
            "Qwen2ForRewardModel",
            "Qwen2ForProcessRewardModel",
        ),
        model_type="qwen2",
        read=read,
        gguf=Gguf(architecture="qwen2", also=("qwen2vl",), layer=LLAMA, fields=_gguf_fields),
    ),
)
