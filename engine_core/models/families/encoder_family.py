"""An encoder under its names: the bare model, and those with a head for masked words or for its
training (which embed as the bare one), for sequences and for tokens."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import EncoderConfig, HeadConfig, token_head
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Gguf

ReadEncoder = Callable[[ConfigFields], EncoderConfig]
ReadHead = Callable[[ConfigFields], HeadConfig]

_GAMMA_AND_BETA = (
    (".LayerNorm.gamma", ".LayerNorm.weight"),
    (".LayerNorm.beta", ".LayerNorm.bias"),
)
"""Ends of tensor names in BERT's first checkpoints, and what they are today."""


def encoder_family(
    stem: str,
    model_type: str,
    read: ReadEncoder,
    head: ReadHead,
    own_token_head: ReadHead = token_head,
    *,
    base: str,
    unused: tuple[str, ...],
    layers: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] | None = None,
    gguf: Gguf | None = None,
) -> tuple[Family, ...]:
    """
    Args:
        stem: what the names begin with.
        base: what the bare model's tensors are prefixed with where there is a head.
        unused: prefixes, with and without `base`, of what only training needs.
        layers: what checkpoints have before a layer's number, to what the model has.
        renamed: ends of modules' names in checkpoints, to those that the model has.
        gguf: files of the bare model by llama.cpp, if they are read.
    """
    of_layers = tuple(
        (start + old, new) for old, new in (layers or {}).items() for start in (base, "")
    )
    suffixes = tuple(
        (f"{old}.{kind}", f"{new}.{kind}")
        for old, new in (renamed or {}).items()
        for kind in ("weight", "bias")
    )

    def entry(names: tuple[str, ...], read_head: ReadHead | None, *left_out: str) -> Family:
        def with_head(fields: ConfigFields) -> EncoderConfig:
            config = read(fields)
            return config if read_head is None else replace(config, head=read_head(fields))

        return Family(
            names=tuple(f"{stem}{name}" for name in names),
            model_type=model_type,
            read=with_head,
            is_encoder=True,
            tensor_prefixes=(*of_layers, (base, "")),
            ignored_prefixes=tuple(start + name for name in left_out for start in ("", base)),
            tensor_suffixes=_GAMMA_AND_BETA + suffixes,
        )

    return (
        replace(entry(("Model", "ForMaskedLM", "ForPreTraining"), None, *unused), gguf=gguf),
        entry(("ForSequenceClassification",), head),
        entry(("ForTokenClassification",), own_token_head, "pooler."),
    )
