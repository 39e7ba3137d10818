"""What a tool call is, what a format of calls says of a text, and what all formats need for it."""

import json
import re
import secrets
import string
from dataclasses import dataclass, field
from typing import Any, Protocol

_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates take no other."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id, compare=False)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The next `length` characters: calls or, if there are none, text."""

    length: int
    calls: tuple[ToolCall, ...] = ()


class ToolCallFormat(Protocol):
    """How a family of models writes calls. What it says of a text it says of every longer one."""

    shows_special_tokens: bool
    """Its markers are special tokens, which are left out of texts otherwise."""
    separators: str
    """Characters that may stand between two calls and mean nothing there."""

    def find(self, text: str, before: str) -> int:
        """Where a call begins, or may begin when more text comes; the length of `text`: nowhere.

        Args:
            before: the character before `text`; empty at the start and behind a call.
        """

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        """What `text` begins with, where `find` found something. None, never at the end: only
        more text can tell."""


def find_marker(text: str, marker: str) -> int:
    """Where `marker` begins, or an end of `text` that may become it."""
    found = text.find(marker)
    if found >= 0:
        return found
    for start in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[start:]):
            return start
    return len(text)


_JSON_PART = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{}\]]', re.DOTALL)


def bracket_end(text: str, parts: re.Pattern[str] = _JSON_PART) -> int | None:
    """Behind the bracket that closes the one that `text` begins with; None: not there yet.

    Args:
        parts: matches whole strings, and brackets.
    """
    depth = 0
    for part in parts.finditer(text):
        if part[0] in ("[", "{", "("):
            depth += 1
        elif part[0] in ("]", "}", ")"):
            depth -= 1
            if depth == 0:
                return part.end()
    return None


def load_json(text: str) -> Any:
    """None if it is none. Raw line breaks in strings, which models write, are let pass."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def make_call(name: object, arguments: object) -> ToolCall | None:
    """None if they are not the name and the arguments of a call."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()  # half of a surrogate pair cannot be sent
    except (TypeError, ValueError, RecursionError):
        return None
    return ToolCall(name, text)


def call_of_json(value: object) -> ToolCall | None:
    """Of `{"name": ..., "arguments": {...}}`; "parameters" is Llama's word for arguments."""
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return make_call(
        value.get("name"), load_json(arguments) if isinstance(arguments, str) else arguments
    )
