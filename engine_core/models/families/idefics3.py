"""The text of Idefics 3 and SmolVLM: Llama's."""

from engine_core.models.families import llama
from engine_core.models.families.family import Family

FAMILIES = tuple(
    Family(
        names=tuple(
            f"{stem}{end}"
            for end in ("ForConditionalGeneration", "Model", "ForSequenceClassification")
        ),
        model_type=stem.lower(),
        read=llama.read,
        text_config=True,
        tensor_prefixes=(("model.text_model.", "model."),),
        ignored_prefixes=("model.vision_model.", "model.connector."),
    )
    for stem in ("Idefics3", "SmolVLM")
)
