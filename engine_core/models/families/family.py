"""A family of models, as its file describes it."""

from collections.abc import Callable
from dataclasses import dataclass

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import EncoderConfig
from engine_core.models.expert_tensors import ExpertNaming
from engine_core.models.families.gguf import Gguf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """How to read one architecture, under all of its names. Its blocks are `ModelConfig.block`.

    Attributes:
        names: "architectures" of a config.json; the first is what a GGUF file becomes.
        read: its config.json to sizes and options.
        text_config: the fields are in the config's "text_config".
        tensor_prefixes: (prefix in checkpoints, prefix that the model uses), first match counts.
        ignored_prefixes: tensors of parts that we leave out, such as a vision tower.
        tensor_suffixes: as `tensor_prefixes`, at the end.
        is_encoder: it reads whole sequences and generates nothing.
        experts: how its checkpoints name experts, if it has any.
        gguf: its files by llama.cpp, if they are read.
    """

    names: tuple[str, ...]
    model_type: str
    read: Callable[[ConfigFields], ModelConfig | EncoderConfig]
    text_config: bool = False
    tensor_prefixes: tuple[tuple[str, str], ...] = ()
    ignored_prefixes: tuple[str, ...] = ()
    tensor_suffixes: tuple[tuple[str, str], ...] = ()
    is_encoder: bool = False
    experts: ExpertNaming | None = None
    gguf: Gguf | None = None


_TEXT = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Prefixes of the hub and of transformers 5."""
_TOWER = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def family_with_images(
    stem: str,
    model_type: str,
    read: Callable[[ConfigFields], ModelConfig],
    *,
    tensor_prefixes: tuple[tuple[str, str], ...] = _TEXT,
    ignored_prefixes: tuple[str, ...] = _TOWER,
) -> Family:
    """The text of a model that takes images. `stem`: what its names begin with."""
    ends = ("ForConditionalGeneration", "Model", "ForSequenceClassification")
    return Family(
        names=tuple(stem + end for end in ends),
        model_type=model_type,
        read=read,
        text_config=True,
        tensor_prefixes=tensor_prefixes,
        ignored_prefixes=ignored_prefixes,
    )
