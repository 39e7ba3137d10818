"""MiniMax M3: a tag for each property, also of objects within, and `item` for those of arrays; each
tag stands behind a token that no text has."""

import re
from dataclasses import dataclass, field
from typing import Any

from frontend.http.tools.calls import ArgumentsText, Parsed, ToolCall, find_marker, make_call
from frontend.http.tools.schema_cases import property_of, types_of
from frontend.http.tools.tagged import typed

MARK = "]<]minimax[>["
BEGIN, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
_TAG = re.compile(re.escape(MARK) + r"<(/?)([^<>\n]{1,160})>")
_INVOKE = re.compile(r'invoke name="([^"]{1,128})"')
_MOST_DEPTH = 64


@dataclass
class _Element:
    name: str
    text: str = ""
    inner: "list[_Element]" = field(default_factory=list)


class NestedFormat:
    """As `ToolCallFormat`. `schemas`: of the arguments of each tool by its name."""

    shows_special_tokens = is_marked = True
    separators = " \t\r\n"
    head = re.compile("(?!)")  # arguments are passed on when they are whole

    def __init__(self, schemas: Any) -> None:
        self._schemas = schemas

    def find(self, text: str, before: str) -> int:
        return find_marker(text, BEGIN)

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        end = text.find(END)
        if end < 0 and not at_end:
            return None
        whole = text if end < 0 else text[: end + len(END)]
        if (calls := self._calls(whole)) is None:
            return Parsed(min(len(text), len(BEGIN)))
        return Parsed(len(whole), calls)

    def arguments(self, name: str) -> ArgumentsText:
        return ArgumentsText()

    def _calls(self, text: str) -> tuple[ToolCall, ...] | None:
        """None: something is malformed or missing."""
        before, *parts = _TAG.split(text)
        open_now = [_Element("")]
        for closes, name, behind in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            if not closes:
                open_now[-1].inner.append(_Element(name, behind))
                open_now.append(open_now[-1].inner[-1])
            elif name not in ((opened := open_now.pop().name), opened.split(" ")[0]):
                return None
            if not 0 < len(open_now) <= _MOST_DEPTH:
                return None
        if before or len(open_now) > 1 or len(open_now[0].inner) != 1:
            return None
        calls = [self._call(each) for each in open_now[0].inner[0].inner]
        found = tuple(call for call in calls if call is not None)
        return found if found and len(found) == len(calls) else None

    def _call(self, invoked: _Element) -> ToolCall | None:
        named = _INVOKE.fullmatch(invoked.name)
        if named is None:
            return None
        root = self._schemas.get(named[1]) or {}
        return make_call(named[1], _value(invoked, {"type": "object", **root}, root))


def _value(element: _Element, schema: Any, root: Any) -> Any:
    types = types_of(schema, root)
    names = {each.name for each in element.inner}
    if names == {"item"} and "object" not in types:
        return [_value(each, property_of(schema, None, root), root) for each in element.inner]
    if names or (not element.text.strip() and "object" in types):
        return {
            each.name: _value(each, property_of(schema, each.name, root), root)
            for each in element.inner
        }
    if not element.text.strip() and "array" in types and "string" not in types:
        return []
    return typed(element.text, types)
