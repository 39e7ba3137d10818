"""LLaVA's text model: Llama, Mistral or Qwen 2, by its `model_type`; of Llama the published models
leave out the sizes."""

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families import llama, mistral, qwen2
from engine_core.models.families.family import Family

PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""The hub's and those of transformers 5."""
TOWER = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_VICUNA = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def read(fields: ConfigFields) -> ModelConfig:
    kind = fields.text("model_type", "llama")
    if kind == "llama":
        return llama.read(fields.with_defaults(_VICUNA))
    readers = {"mistral": mistral.read, "qwen2": qwen2.read}
    if kind not in readers:
        raise UnsupportedArchitecture(f'LLaVA over a text model of type "{kind}" is not supported')
    return readers[kind](fields)


FAMILIES = (
    Family(
        names=("LlavaForConditionalGeneration", "LlavaModel", "LlavaForSequenceClassification"),
        model_type="llava",
        read=read,
        text_config=True,
        tensor_prefixes=PREFIXES,
        ignored_prefixes=TOWER,
    ),
)
