"""Names of models that everybody knows (`qwen3:8b`), and what each means: known_names.toml."""

import functools
import tomllib
from pathlib import Path


@functools.cache
def known_names() -> dict[str, dict[str, str]]:
    """By name and tag what is meant; "default" comes first and has the tag of the name alone."""
    return tomllib.loads(Path(__file__).with_name("known_names.toml").read_text())


def meant_by(name: str) -> str:
    """What a known name means: the same for `qwen3`, `qwen3:latest` and `qwen3:8b`. Any other name
    is itself."""
    stem = name.removesuffix(":latest")
    family, _, tag = stem.lower().partition(":")
    tags = known_names().get(family, {})
    return stem if tag == "default" else tags.get(tag or tags.get("default", ""), stem)
