"""Mistral: one window for all layers; null is none, absent is the 4096 of its first model."""

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_window
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    return read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=8,
        sliding_windows=(read_window(fields, 4096),) * fields.positive_int("num_hidden_layers"),
    )


def _window(meta: Metadata) -> int | None:
    return int(meta.number("attention.sliding_window", None) or 0) or None


def _is_mistral(meta: Metadata) -> bool:
    """Whether a file of llama.cpp's architecture llama is Mistral's: no other has a window, but for
    Mixtral."""
    return _window(meta) is not None and not meta.number("expert_count", 0)


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    if "blk.0.attn_q.bias" in meta.tensors:
        meta.refuse("a sliding window together with attention biases")
    return {"hidden_act": "silu", "sliding_window": _window(meta)}


FAMILIES = (
    Family(
        names=("MistralForCausalLM", "MistralModel", "MistralForSequenceClassification"),
        model_type="mistral",
        read=read,
        gguf=Gguf(
            architecture="llama",
            layer=LLAMA,
            fields=_gguf_fields,
            is_of=_is_mistral,
            pairs_rows=True,
        ),
    ),
)
