"""Mistral Small 3.1 and later: Ministral 3 or Mistral, by the text's `model_type`."""

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.families.dense import ministral3, mistral
from engine_core.models.families.family import family_with_images


def read(fields: ConfigFields) -> ModelConfig:
    is_mistral = fields.text("model_type", "mistral") == "mistral"
    return mistral.read(fields) if is_mistral else ministral3.read(fields)


FAMILIES = (family_with_images("Mistral3", "mistral3", read),)
