"""How families of models fill in the middle of a text, as data: `fim_formats.toml`."""

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIX, SUFFIX = "{prefix}", "{suffix}"


@functools.cache
def format_rows() -> dict[str, dict[str, Any]]:
    """The families' formats by name."""
    with Path(__file__).with_name("fim_formats.toml").open("rb") as stream:
        return tomllib.load(stream)


def prompt_parts(prompt: str) -> list[str]:
    """Tokens, and PREFIX and SUFFIX."""
    return [part for part in re.split(r"(\{prefix\}|\{suffix\})", prompt) if part]


def fim_tokens(special_tokens: Mapping[str, str]) -> set[str]:
    """The tokens of all formats, and those that a model's file names."""
    found = {text for name, text in special_tokens.items() if name.startswith("fim_")}
    for row in format_rows().values():
        found.update(*(row.get(name, ()) for name in ("repo", "file", "ends")))
        found.update(prompt_parts(row["prompt"]))
    return found - {PREFIX, SUFFIX}
