"""Arguments that a model writes as tags, one a parameter, made JSON as they come."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from frontend.http.tools.calls import find_marker, load_finite, outside_strings
from frontend.http.tools.schema_cases import property_of, types_of
from frontend.http.tools.syntax import CallSyntax, Field

WORD = re.compile(r"[\w./-]{1,128}")
_TYPE = re.compile(r"[\w-]{1,16}")
_TEXT_TYPES = ("string", "true")
_NO_VALUE = object()


class NeedsMore(Exception):
    """Only more text can tell what it is."""


def skip_literal(text: str, at: int, literal: str, *, before_value: bool = False) -> int | None:
    """Behind a literal that stands at `at`, white space in it being any; None: it does not.
    Raises NeedsMore: it may.

    Args:
        before_value: white space at its end is as it is, once, or missing.
    """
    words = literal.split()
    for word in words:
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(word, at):
            if word.startswith(text[at:]):
                raise NeedsMore
            return None
        at += len(word)
    if not before_value or not words:
        return at
    blank = literal[len(literal.rstrip()) :]
    if text.startswith(blank, at):
        return at + len(blank)
    if blank.startswith(text[at:]):
        raise NeedsMore
    return at


class TaggedArguments:
    """Of one call; as `ArgumentsText`.

    Args:
        syntax: how a parameter is written.
        closing: the first word behind the last of them.
        schema: of all arguments.
    """

    def __init__(self, syntax: CallSyntax, closing: str, schema: Mapping[str, Any] | None) -> None:
        parameter, self._wrapped = syntax.parameter, syntax.wrapped
        value = parameter.index(Field("value"))
        self._opening, self._behind = parameter[:value], parameter[value + 1 :]
        assert isinstance(self._behind[0], str) and isinstance(parameter[0], str)
        self._end = self._behind[0].split()[0]
        self._marker = self._end
        """The word that ends the value which is being read."""
        self._blank = self._behind[0][: len(self._behind[0]) - len(self._behind[0].lstrip())]
        self._next = (parameter[0].split()[0], closing)
        self._closing = closing
        stop = str(parameter[parameter.index(Field("key")) + 1]).lstrip()[0]
        key = rf"[^\s{stop}](?:[^\n{stop}]{{0,126}}[^\s{stop}])?"
        self._fields = {"key": re.compile(key), "type": _TYPE}
        self._schema = schema or {}
        self._held = ""
        self._num_values = 0
        self._key: str | None = None
        self._is_text: bool | None = None
        self._is_json = False
        self.num_chars = 0
        """Characters that were fed, all together, but for those behind the end."""
        self.is_over = False
        self.is_whole = False

    def feed(self, text: str) -> str:
        """The next piece of the JSON object that is certain by now."""
        self._held += text
        self.num_chars += len(text)
        found: list[str] = []
        try:
            while not self.is_over:
                if self._key is None:
                    self._begin(found)
                else:
                    self._pass_on(found)
        except NeedsMore:
            pass
        if self.is_over:
            self.num_chars -= len(self._held)
        return "".join(found)

    def _begin(self, found: list[str]) -> None:
        """Takes what stands before a value, or sees the end."""
        rest = self._held.lstrip()
        if not rest or (rest != self._closing and self._closing.startswith(rest)):
            raise NeedsMore
        if rest.startswith(self._closing):
            self._held = rest
            self.is_over = self.is_whole = True
            found.append("}" if self._num_values else "{}")
            return
        at, fields = 0, {"type": ""}
        for number, part in enumerate(self._opening):
            if isinstance(part, str):
                is_last = number == len(self._opening) - 1
                behind = skip_literal(self._held, at, part, before_value=is_last)
            else:
                match = self._fields[part.name].match(self._held, at)
                if at == len(self._held) or (match and match.end() == len(self._held)):
                    raise NeedsMore
                behind = None if match is None else match.end()
                fields[part.name] = "" if match is None else match[0]
            if behind is None:
                self.is_over = True
                return
            at = behind
        opening, closing = self._wrapped
        self._marker = self._end
        if opening and opening.startswith(self._held[at : at + len(opening)]):
            at += len(opening)
            if at > len(self._held):
                raise NeedsMore
            self._marker = closing + self._end
        self._held, self._key = self._held[at:], fields["key"]
        self._is_text = fields["type"] in _TEXT_TYPES if fields["type"] else None
        found.append("{" if not self._num_values else ", ")
        found.append(f"{json.dumps(self._key, ensure_ascii=False)}: ")
        self._num_values += 1
        types = self._types()
        if self._is_text is None and "string" in types:
            self._is_text = True if "null" not in types else None
        if self._marker != self._end and (not types or "string" in types):
            self._is_text = True
        self._is_json = not self._is_text and bool(types) and "string" not in types
        if self._is_text:
            found.append('"')

    def _types(self) -> set[str]:
        return types_of(property_of(self._schema, self._key or "", self._schema), self._schema)

    def reads_key(self, name: str) -> bool:
        """Whether a property of this name can be written so."""
        return self._fields["key"].fullmatch(name) is not None

    def _pass_on(self, found: list[str]) -> None:
        """Takes what is certain of a value."""
        end, is_whole = self._certain()
        if not is_whole:
            if self._is_text:
                found.append(_escaped(self._held[:end]))
                self._held = self._held[end:]
            raise NeedsMore
        raw = self._held[:end].removesuffix(self._blank)
        self._held = self._held[end + len(self._marker) - len(self._end) :]
        for part in self._behind:
            assert isinstance(part, str)
            behind = skip_literal(self._held, 0, part)
            assert behind is not None
            self._held = self._held[behind:]
        if self._is_text:
            found.append(_escaped(raw) + '"')
        else:
            value = typed(raw, self._types(), is_text=self._is_text)
            found.append(json.dumps(value, ensure_ascii=False))
        self._key = None

    def _certain(self) -> tuple[int, bool]:
        """Where the value ends, and that it does: before a marker behind which another parameter
        or the end of the call is; or how much of what is held belongs to it."""
        at = find_marker(self._held, self._marker)
        if self._is_json and at < len(self._held) and self._held.lstrip()[:1] in ("{", "["):
            end = outside_strings(self._held, 0, self._marker)
            at = len(self._held) if end is None else end
        while self._held.startswith(self._marker, at):
            rest = self._held[at + len(self._marker) :].lstrip()
            if any(rest.startswith(each) for each in self._next):
                return at, True
            if any(each.startswith(rest) for each in self._next):
                break
            at += 1 + find_marker(self._held[at + 1 :], self._marker)
        return len(self._held[:at].removesuffix(self._blank)), False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed(raw: str, types: set[str], *, is_text: bool | None = None) -> Any:
    """The value that a model wrote: text as it is, all else as JSON, or as Python if it is none.

    Args:
        types: those that its schema lets through; empty: it does not say.
        is_text: known; None: the schema says.
    """
    if is_text:
        return raw
    stripped = raw.strip()
    if "string" in types and is_text is None:
        return None if "null" in types and stripped in ("null", "None") else raw
    for read in (load_finite, ast.literal_eval):
        try:
            value = read(stripped)
            json.dumps(value, allow_nan=False).encode()
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return value
    return raw
