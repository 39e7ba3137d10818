"""Qwen 2 and 2.5, and the text of Qwen2-VL and Qwen2.5-VL: biases on q, k and v only."""

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_qwen_windows
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    return read_decoder(
        fields,
        default_max_position=32_768,
        default_num_kv_heads=32,
        qkv_bias=True,
        sliding_windows=read_qwen_windows(fields),
    )


def _gguf_fields(_meta: Metadata, _config: Fields) -> Fields:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _with_images(stem: str, model_type: str) -> Family:
    """Both the hub's prefixes and those of transformers 5."""
    return Family(
        names=tuple(
            f"{stem}{end}"
            for end in ("ForConditionalGeneration", "Model", "ForSequenceClassification")
        ),
        model_type=model_type,
        read=read,
        text_config=True,
        tensor_prefixes=(("model.language_model.", "model."),),
        ignored_prefixes=("visual.", "model.visual."),
    )


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
        gguf=Gguf(architecture="qwen2", layer=LLAMA, fields=_gguf_fields),
    ),
    _with_images("Qwen2VL", "qwen2_vl"),
    _with_images("Qwen2_5_VL", "qwen2_5_vl"),
)
