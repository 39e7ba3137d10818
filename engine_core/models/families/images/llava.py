"""LLaVA: Llama, Mistral or Qwen 2, by the text's `model_type`; of Llama the published models leave
out the sizes."""

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.dense import llama, mistral, qwen2
from engine_core.models.families.family import family_with_images

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


FAMILIES = (family_with_images("Llava", "llava", read),)
