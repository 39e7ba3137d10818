"""Reads calls of any format that `formats.toml` describes."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from frontend.http.tools.braces import read_braces
from frontend.http.tools.calls import (
    JSON_STRING,
    ArgumentsText,
    Parsed,
    ToolCall,
    bracket_end,
    call_of_json,
    find_at_line_start,
    find_marker,
    finite,
    load_json,
    make_call,
    outside_strings,
)
from frontend.http.tools.pythonic import calls_of_python
from frontend.http.tools.syntax import CallSyntax, Field, Part
from frontend.http.tools.tagged import WORD, NeedsMore, TaggedArguments, skip_literal

_FIELDS = {
    "name": WORD,
    "id": re.compile(r"[\w.:-]{0,128}"),
    "index": re.compile(r"\d{1,6}"),
}


class MarkedFormat:
    """As `ToolCallFormat`.

    Args:
        schemas: of the arguments of each tool by its name.
    """

    def __init__(
        self, syntax: CallSyntax, schemas: Mapping[str, Mapping[str, Any] | None] | None = None
    ) -> None:
        self._syntax = syntax
        self._schemas = schemas or {}
        self.shows_special_tokens = syntax.are_special
        self.separators = " \t\r\n"
        firsts = [syntax.begin, *(str(call[0]) for call in syntax.calls)]
        self._markers = tuple(
            dict.fromkeys(
                each.split()[0]
                for each, call in zip(firsts, (None, *syntax.calls), strict=True)
                if each and (call is None or isinstance(call[0], str))
            )
        )
        self.is_marked = bool(self._markers)
        self.head = re.compile("|".join(map(self._head, syntax.calls)))

    def _head(self, call: Sequence[Part]) -> str:
        """A call up to its arguments, if these can be passed on as they come."""
        pattern = f"(?:{_lenient(self._syntax.begin)}\\s*)?" if self._syntax.begin else ""
        for part in call:
            if isinstance(part, str):
                pattern += _lenient(part)
            elif part.name == "name":
                pattern += rf"({WORD.pattern})"
            elif part.name in _FIELDS:
                pattern += f"(?:{_FIELDS[part.name].pattern})"
            elif part.name == "arguments":
                return pattern + r"\s*(?=\{)"
            elif part.name == "parameters":
                return pattern + r"(?=\s*[^\s\w./-])"
            elif part.name in ("object", "objects", "object_lines") and self._syntax.keys:
                name, arguments = map(re.escape, self._syntax.keys)
                skipped = r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)?'
                head = (
                    rf'{skipped}"{name}"\s*:\s*"([^"\\]+)"\s*,\s*"(?:{arguments}|parameters)"'
                    r"\s*:\s*(?=\{)"
                )
                bracket = "" if part.name == "object" else r"\[?\s*"
                return pattern + r"\s*" + bracket + head
            else:
                break
        return "(?!)"

    def arguments(self, name: str) -> ArgumentsText | TaggedArguments:
        """A reader of the arguments of a call of `name`, fed the text behind `head`."""
        for call in self._syntax.calls:
            if Field("parameters") in call:
                behind = call[call.index(Field("parameters")) + 1]
                assert isinstance(behind, str)
                return self._tagged(name, behind.split()[0])
        return ArgumentsText()

    def _tagged(self, name: str, closing: str) -> TaggedArguments:
        return TaggedArguments(self._syntax, closing, self._schemas.get(name))

    def find(self, text: str, before: str) -> int:
        if not self._markers:
            return find_at_line_start(text, "[", before)
        return min(find_marker(text, marker) for marker in self._markers)

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        try:
            begun = self._behind_begin(text)
            found = self._any_call(text, begun, at_end=at_end)
            if found is not None:
                calls, at = found
                return Parsed(self._behind_end(text, at, at_end=at_end), calls)
        except NeedsMore:
            if not at_end:
                return None
        marker = next((each for each in self._markers if text.startswith(each)), text[:1])
        return Parsed(max(1, min(len(text), len(marker))))

    def _behind_begin(self, text: str) -> int:
        begin = self._syntax.begin
        at = skip_literal(text, 0, begin) if begin else None
        return 0 if at is None else at

    def _behind_end(self, text: str, at: int, *, at_end: bool) -> int:
        """The place behind the words that close all calls; `at` if they are missing."""
        behind = self._literal(text, at, self._syntax.end, at_end) if self._syntax.end else at
        return at if behind is None else behind

    def _any_call(
        self, text: str, at: int, *, at_end: bool
    ) -> tuple[tuple[ToolCall, ...], int] | None:
        needs_more = False
        for call in self._syntax.calls:
            try:
                if found := self._call(text, at, call, at_end=at_end):
                    return found
            except NeedsMore:
                needs_more = True
        if needs_more:
            raise NeedsMore
        return None

    def _call(
        self, text: str, at: int, call: Sequence[Part], *, at_end: bool
    ) -> tuple[tuple[ToolCall, ...], int] | None:
        """
        Raises:
            NeedsMore
        """
        name, calls = "", None
        for number, part in enumerate(call):
            if isinstance(part, str):
                behind = self._literal(text, at, part, at_end and calls is not None)
                if behind is None and calls is None:
                    return None
                at = at if behind is None else behind
                continue
            if (field := _FIELDS.get(part.name)) is not None:
                match = field.match(text, at)
                if match is None or match.end() == len(text):
                    _raise_if_open(text, at)
                    return None
                name = match[0] if part.name == "name" else name
                at = match.end()
                continue
            closing = call[number + 1] if number + 1 < len(call) else ""
            assert isinstance(closing, str)
            words = closing.split()
            found = self._body(text, at, part.name, name, words[0] if words else "", at_end=at_end)
            if found is None:
                return None
            calls, at = found
            if not calls:
                return None
        return None if calls is None else (calls, at)

    def _literal(self, text: str, at: int, literal: str, may_be_cut: bool) -> int | None:
        try:
            return skip_literal(text, at, literal)
        except NeedsMore:
            if not may_be_cut:
                raise
            return len(text)

    def _body(
        self, text: str, at: int, field: str, name: str, closing: str, *, at_end: bool
    ) -> tuple[tuple[ToolCall, ...], int] | None:
        """The calls, or the one whose arguments stand here, and where they end."""
        if field == "parameters":
            tagged = self._tagged(name, closing)
            written = tagged.feed(text[at:])
            if not tagged.is_over:
                raise NeedsMore
            if not tagged.is_whole:
                return None
            return (ToolCall(name, written),), at + tagged.num_chars
        if field.startswith("python"):
            end = outside_strings(text, at, closing)
            if end is None:
                raise NeedsMore
            return calls_of_python(text[at:end]), end
        if field == "braces":
            if not text[at:].strip():
                raise NeedsMore
            read = read_braces(text, at, self._syntax.quote)
            call = None if read is None else make_call(name, read[0])
            return None if read is None or call is None else ((call,), read[1])
        while at < len(text) and text[at].isspace():
            at += 1
        _raise_if_open(text, at)
        if text[at : at + 1] not in (("{",) if field in ("object", "arguments") else ("{", "[")):
            return None
        if field == "arguments":
            length = bracket_end(text[at:])
            if length is None:
                raise NeedsMore
            call = make_call(name, load_json(text[at : at + length]))
            return None if call is None else ((call,), at + length)
        return self._objects(text, at, field, closing, at_end=at_end)

    def _objects(
        self, text: str, at: int, field: str, closing: str, *, at_end: bool
    ) -> tuple[tuple[ToolCall, ...], int] | None:
        """Up to the words that close them outside of strings; without such up to their bracket."""
        end = outside_strings(text, at, closing, JSON_STRING) if closing else None
        if end is None:
            length = bracket_end(text[at:])
            if length is not None and (not closing or at_end):
                end = at + length
            elif closing and at_end and closing in text[at:]:  # a string without its end
                end = at + text[at:].index(closing)
            elif at_end and field == "object":  # a brace is missing
                end = len(text)
            else:
                raise NeedsMore
        body = text[at:end].strip()
        values = _values(body, is_list=field != "object")
        if values is None:  # the fault of small models: the last brace is missing
            values = _values(body + "}", is_list=False)
        calls = [self._call_of(value) for value in values or ()]
        found = tuple(call for call in calls if call is not None)
        return (found, end) if found and len(found) == len(calls) else None

    def _call_of(self, value: object) -> ToolCall | None:
        if not isinstance(value, dict):
            return None
        if not self._syntax.keys:
            return make_call(*next(iter(value.items()))) if len(value) == 1 else None
        name, arguments = self._syntax.keys
        if arguments in value:
            value = {"name": value.get(name), "arguments": value[arguments]}
        return call_of_json(value)


def _lenient(literal: str) -> str:
    return r"\s*".join(["", *map(re.escape, literal.split()), ""])


def _raise_if_open(text: str, at: int) -> None:
    if at >= len(text) or WORD.fullmatch(text, at):
        raise NeedsMore


def _values(text: str, *, is_list: bool) -> list[Any] | None:
    """Of a list, or of objects one behind the other; None: it is none."""
    value = load_json(text)
    if value is not None:
        return value if isinstance(value, list) and is_list else [value]
    if not is_list:
        return None
    values, decoder = [], json.JSONDecoder(strict=False, parse_float=finite)
    try:
        while text:
            value, end = decoder.raw_decode(text)
            values.append(value)
            text = text[end:].lstrip(" \t\r\n,;")
    except (ValueError, RecursionError):
        return None
    return values or None
