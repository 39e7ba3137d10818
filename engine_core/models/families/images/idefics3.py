"""Idefics 3 and SmolVLM: Llama."""

from engine_core.models.families.dense import llama
from engine_core.models.families.family import family_with_images

FAMILIES = tuple(
    family_with_images(
        stem,
        stem.lower(),
        llama.read,
        tensor_prefixes=(("model.text_model.", "model."),),
        ignored_prefixes=("model.vision_model.", "model.connector."),
    )
    for stem in ("Idefics3", "SmolVLM")
)
