"""Which groups there are.

Owns finding and loading them. Must not know what is in them.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from scripts.gpu.frame import Group

PACKAGE = "scripts.gpu.groups"

NOT_THERE = (
    Group(
        "published_weights",
        missing="SmolLM2's are larger than what travels to such a machine; whole_models and "
        "decode_steps compare random weights with transformers instead",
    ),
)
"""What was asked for and cannot be."""


def group_names() -> list[str]:
    """Every group that can run, in the order in which they do."""
    folder = Path(__file__).parent / "groups"
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def load_group(name: str) -> Group:
    """The group, or what keeps it from being loaded."""
    try:
        group: Group = importlib.import_module(f"{PACKAGE}.{name}").group()
        group.validate()
    except Exception as error:
        return Group(name, broken=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return group
