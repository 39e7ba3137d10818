"""All families: `FAMILIES` of every module in the folders beside this file."""

import importlib
import pkgutil
from collections.abc import Iterator

from engine_core.models.families import dense, encoders, experts, hybrids
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Metadata


def _families() -> Iterator[Family]:
    for folder in (dense, experts, hybrids, encoders):
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            yield from importlib.import_module(module.name).FAMILIES


FAMILIES: tuple[Family, ...] = tuple(_families())
BY_NAME: dict[str, Family] = {name: family for family in FAMILIES for name in family.names}
SUPPORTED_ARCHITECTURES = tuple(sorted(BY_NAME))
ENCODER_STEMS = tuple(
    family.names[0].removesuffix("Model")
    for family in FAMILIES
    if family.is_encoder and family.names[0].endswith("Model")
)
"""First parts of the names of encoders, such as "Bert"."""
GGUF_ARCHITECTURES = tuple(
    sorted({name for each in FAMILIES if each.gguf for name in each.gguf.architectures})
)


def family_of_gguf(architecture: str, meta: Metadata) -> Family | None:
    """The family of a GGUF file; None: it is of no family here."""
    general: Family | None = None
    for family in FAMILIES:
        gguf = family.gguf
        if gguf is None or architecture not in gguf.architectures:
            continue
        if gguf.is_of is None:
            general = family
        elif gguf.is_of(meta):
            return family
    return general
