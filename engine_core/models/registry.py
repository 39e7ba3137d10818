"""Which of our models runs an architecture. One that is not here may still run through
transformers, which is why it is an error of its own."""

from collections.abc import Mapping
from typing import Any

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.config_names import architecture_of
from engine_core.models.encoders.encoder_configs import EncoderConfig
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.families.family import Family
from engine_core.models.families.table import BY_NAME, SUPPORTED_ARCHITECTURES
from engine_core.models.text_part import text_part


def find_family(config: Mapping[str, Any]) -> tuple[str, Family]:
    """The (name, family) for a config: by "architectures", or by "model_type" if it has none. Of a
    model that takes more than text those of its text.

    Raises:
        UnsupportedArchitecture: neither is known here.
        ModelConfigError: "architectures" is no list of names.
    """
    whole, config = config, text_part(config) or config
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(f"config: architectures is {names!r}, it must be a list of names")
    for name in names:
        if name in BY_NAME:
            return name, BY_NAME[name]
    if not names:
        for name, family in BY_NAME.items():
            if family.model_type == config.get("model_type"):
                return name, family
    wanted = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r}"
    if config is not whole:
        wanted += f" (the text of {architecture_of(whole)})"
    raise UnsupportedArchitecture(
        f"architecture {wanted} has no native code; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def read_model_config(config: Mapping[str, Any]) -> ModelConfig | EncoderConfig:
    """Resolve the dictionary of a config.json, of a decoder or an encoder.

    Raises:
        UnsupportedArchitecture: the architecture, or an option of it, has no exact code here.
        ModelConfigError: a field is missing or impossible.
    """
    name, family = find_family(config)
    text = text_part(config)
    if text is not None and text.get("use_bidirectional_attention") is True:
        raise UnsupportedArchitecture(f"{name}: the text of a prompt is seen in both directions")
    return family.read(ConfigFields(text or config))
