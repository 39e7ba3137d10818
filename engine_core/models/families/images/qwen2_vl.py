"""Qwen2-VL and Qwen2.5-VL: Qwen 2."""

from engine_core.models.families.dense import qwen2
from engine_core.models.families.family import family_with_images

FAMILIES = tuple(
    family_with_images(
        stem,
        model_type,
        qwen2.read,
        # the hub's and those of transformers 5
        tensor_prefixes=(("model.language_model.", "model."),),
        ignored_prefixes=("visual.", "model.visual."),
    )
    for stem, model_type in (("Qwen2VL", "qwen2_vl"), ("Qwen2_5_VL", "qwen2_5_vl"))
)
