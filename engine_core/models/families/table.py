"""All families. Where several may read a GGUF file, the first that says so does."""

from engine_core.models.families import (
    arcee,
    bert,
    gemma3,
    granite,
    idefics3,
    llama,
    llava,
    ministral3,
    mistral,
    mixtral,
    modernbert,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Metadata

_MODULES = (
    mixtral,
    mistral,
    llama,
    qwen2,
    qwen3,
    qwen3_moe,
    gemma3,
    qwen2_moe,
    smollm3,
    phi3,
    olmo2,
    olmoe,
    granite,
    arcee,
    llava,
    ministral3,
    idefics3,
    bert,
    modernbert,
)

FAMILIES: tuple[Family, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)
BY_NAME: dict[str, Family] = {name: family for family in FAMILIES for name in family.names}
SUPPORTED_ARCHITECTURES = tuple(sorted(BY_NAME))
ENCODER_STEMS = tuple(
    family.names[0].removesuffix("Model")
    for family in FAMILIES
    if family.is_encoder and family.names[0].endswith("Model")
)
"""First parts of the names of encoders, such as "Bert"."""
GGUF_ARCHITECTURES = tuple(sorted({each.gguf.architecture for each in FAMILIES if each.gguf}))


def family_of_gguf(architecture: str, meta: Metadata) -> Family | None:
    """The family of a GGUF file; None: it is of no family here."""
    for family in FAMILIES:
        gguf = family.gguf
        if gguf is not None and gguf.architecture == architecture and gguf.is_of(meta):
            return family
    return None
