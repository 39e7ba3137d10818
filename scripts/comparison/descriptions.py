"""What a --engine, --peer or --server on the command line consists of.

Owns the grammar `NAME=WORDS`. Must not know what the words mean to an engine.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass


class DescriptionError(Exception):
    """A --engine, --peer or --server that means nothing."""


@dataclass(frozen=True, slots=True)
class Description:
    """
    Attributes:
        setting: as typed.
        words: as a shell would split them, without those that set variables.
        environment: from words such as `env:NAME=VALUE`.
    """

    name: str
    setting: str
    words: tuple[str, ...]
    environment: dict[str, str]


def describe(text: str, option: str) -> Description:
    """
    Raises:
        DescriptionError: no name, an unclosed quote, or a variable without a value.
    """
    name, equals, rest = text.partition("=")
    name = name.strip()
    if not equals or not name or any(mark in name for mark in " /"):
        raise DescriptionError(f"{option} {text!r} begins with no name; write {option} NAME=...")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise DescriptionError(f"{option} {text!r}: {error}") from error
    variables = [word.removeprefix("env:") for word in words if word.startswith("env:")]
    if wrong := [one for one in variables if "=" not in one]:
        raise DescriptionError(
            f"{option} {text!r}: env:{wrong[0]} has no value; write env:{wrong[0]}=VALUE"
        )
    return Description(
        name,
        text,
        tuple(word for word in words if not word.startswith("env:")),
        dict(one.split("=", 1) for one in variables),
    )
