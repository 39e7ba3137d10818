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
        tensor_prefixes: (prefix in checkpoints, prefix that the model uses), first match counts.
        ignored_prefixes: tensors of parts that we leave out, such as a pooler.
        tensor_suffixes: as `tensor_prefixes`, at the end.
        is_encoder: it reads whole sequences and generates nothing.
        experts: how its checkpoints name experts, if it has any.
        gguf: its files by llama.cpp, if they are read.
    """

    names: tuple[str, ...]
    model_type: str
    read: Callable[[ConfigFields], ModelConfig | EncoderConfig]
    tensor_prefixes: tuple[tuple[str, str], ...] = ()
    ignored_prefixes: tuple[str, ...] = ()
    tensor_suffixes: tuple[tuple[str, str], ...] = ()
    is_encoder: bool = False
    experts: ExpertNaming | None = None
    gguf: Gguf | None = None
