"""What a tool call is, what a format of calls says of a text, and what all formats need for it."""

import json
import re
import secrets
import string
import sys
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
class ArgumentsDelta:
    """More of the arguments of the call before it."""

    text: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """The next `length` characters: calls or, if there are none, text."""

    length: int
    calls: tuple[ToolCall, ...] = ()


class ArgumentsReader(Protocol):
    """Of one call: what a model writes, in pieces, as pieces of a JSON object."""

    num_chars: int
    """Characters that were fed, all together, but for those behind the end."""
    is_over: bool
    is_whole: bool

    def feed(self, text: str) -> str:
        """The next piece of the JSON object that is certain by now."""


class ToolCallFormat(Protocol):
    """How a family of models writes calls. What it says of a text it says of every longer one."""

    shows_special_tokens: bool
    """Its markers are special tokens, which are left out of texts otherwise."""
    separators: str
    """Characters that may stand between two calls and mean nothing there."""
    is_marked: bool
    """A call begins with words that nothing else begins with."""
    head: re.Pattern[str]
    """A call up to arguments that can be passed on as they come; its last group is the name."""

    def find(self, text: str, before: str) -> int:
        """Where a call begins, or may begin when more text comes; the length of `text`: nowhere.

        Args:
            before: the character before `text`; empty at the start and behind a call.
        """

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        """What `text` begins with, where `find` found something. None, never at the end: only
        more text can tell."""

    def arguments(self, name: str) -> "ArgumentsReader":
        """A reader of the arguments of a call of `name`, fed the text behind `head`."""


_OFTEN_PARSED_CHARS = 2048
_GROWTH = 16
"""A longer text is parsed again when it has grown by a 16th: all of it is scanned each time."""


def is_scanned_enough(num_held: int, parsed_at: int) -> bool:
    """Whether a text of so many characters, which may become a call, need not be parsed yet.
    `parsed_at`: its length when it was parsed last; 0: never."""
    grown = num_held - parsed_at
    return num_held > _OFTEN_PARSED_CHARS and grown * _GROWTH < num_held


def find_marker(text: str, marker: str) -> int:
    """Where `marker` begins, or an end of `text` that may become it."""
    found = text.find(marker)
    if found >= 0:
        return found
    for start in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[start:]):
            return start
    return len(text)


def find_at_line_start(text: str, sign: str, before: str, blank: str | None = None) -> int:
    """The first `sign` that begins a line, or an answer (`before` is empty), but for characters of
    `blank`; the length of `text`: there is none."""
    first = len(text) - len(text.lstrip(blank)) if not before else -1
    start = text.find(sign)
    while start >= 0:
        if start == first or (text[start - 1] if start else before) == "\n":
            return start
        start = text.find(sign, start + 1)
    return len(text)


JSON_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"?'
STRINGS = JSON_STRING + r"""|'[^'\\]*(?:\\.[^'\\]*)*'?"""
"""A string of Python or JSON, which may be open at the end."""


def outside_strings(text: str, at: int, words: str, strings: str = STRINGS) -> int | None:
    """The first place of `words` from `at` on that is no part of a string; None: not there yet."""
    parts = re.compile(rf"{strings}|{re.escape(words)}", re.DOTALL)
    return next((each.start() for each in parts.finditer(text, at) if each[0] == words), None)


_JSON_PART = re.compile(JSON_STRING + r"|[\[{}\]]", re.DOTALL)


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


CALL_HEAD = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_CLOSING = {"{": "}", "[": "]"}
_BETWEEN_STRINGS = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")


class ArgumentsText:
    """A JSON object in pieces: it ends with its last brace, or before what no JSON has."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._in_string = self._is_escaped = False
        self.num_chars = 0
        """Characters that were fed, all together."""
        self.is_over = False
        self.is_whole = False

    def feed(self, text: str) -> str:
        """What of it belongs to the object; raw line breaks in strings are escaped."""
        found = []
        for char in text:
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._in_string, self._is_escaped = char != '"', char == "\\"
            elif char in _CLOSING:
                self._closing.append(_CLOSING[char])
            elif char == '"':
                self._in_string = True
            elif self._closing[-1:] == [char]:
                self._closing.pop()
                self.is_over = self.is_whole = not self._closing
            elif char not in _BETWEEN_STRINGS:
                self.is_over = True
                break
            self.num_chars += 1
            found.append(json.dumps(char)[1:-1] if self._in_string and char < " " else char)
            if self.is_over:
                break
        return "".join(found)


def finite(number: str) -> float:
    """The next one of double precision: a schema does not say that `1e999` is none."""
    return min(max(float(number), -sys.float_info.max), sys.float_info.max)


def load_finite(text: str) -> Any:
    """The value of a JSON text. Raw line breaks in strings, which models write, are let pass.
    Raises ValueError."""
    return json.loads(text, strict=False, parse_float=finite)


def load_json(text: str) -> Any:
    """The value that `load_finite` reads; None if it is no JSON."""
    try:
        return load_finite(text)
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
