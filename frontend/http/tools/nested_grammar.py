"""Grammar of MiniMax M3's calls, see `nested.py`."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from frontend.http.tools.nested import BEGIN, END, MARK
from frontend.http.tools.rules import OfferedTool, Rules
from frontend.http.tools.schema_cases import (
    NotEnforced,
    Schema,
    cases_of,
    constants_of,
    not_enforced,
    objects_of,
    types_of,
)
from frontend.http.tools.value_grammar import one_of, text_of

_NAME = re.compile(r"[^<>\s/]([^<>\n]{0,126}[^<>\s])?")
_MOST_DEPTH = 60


def nested_calls(rules: Rules, tools: Sequence[OfferedTool], has_one_call: bool) -> tuple[str, str]:
    """The first word of all calls, and the rest of them."""
    calls = []
    for tool in tools:
        try:
            members = _Tags(rules, tool).members(tool.parameters or {}, 0)
        except NotEnforced as error:
            raise not_enforced(tool.field, error) from None
        opening = rules.word(f"{MARK}<invoke name={json.dumps(tool.name, ensure_ascii=False)}>")
        calls.append(f"{opening} {members} {rules.word(MARK + '</invoke>')} /\\n?/")
    head, *rest = rules.words(BEGIN)
    call = rules.any_of(calls)
    return head, " ".join([*rest, r"/\n?/", call if has_one_call else f"{call}+", rules.word(END)])


class _Tags:
    """Raises NotEnforced."""

    def __init__(self, rules: Rules, tool: OfferedTool) -> None:
        self._rules, self._tool = rules, tool
        self._root = tool.parameters or {}
        self._referred: dict[tuple[str, str], str] = {}
        """Rules by names and references: a schema may lead to itself."""

    def members(self, schema: Any, depth: int) -> str:
        found = []
        for properties, _ in objects_of(schema, self._root):
            pairs = [
                (self._element(name, each, depth + 1), may_lack)
                for name, each, may_lack in properties
            ]
            found.append(self._rules.separated(pairs, '""'))
        return one_of(self._rules, found)

    def _element(self, name: str, schema: Any, depth: int) -> str:
        if not _NAME.fullmatch(name):
            raise NotEnforced(f"a property cannot be named {name!r:.100}")
        if depth > _MOST_DEPTH:
            raise NotEnforced(f"a schema that is nested deeper than {_MOST_DEPTH} is not enforced")
        ref = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        if (name, str(ref)) in self._referred:
            return self._referred[name, str(ref)]
        rule = self._rules.new("", kind="element")
        if ref is not None:
            self._referred[name, str(ref)] = rule
        either = " | ".join(self._either(schema, f"{MARK}</{name}>", depth))
        return self._rules.add(rule, f"{self._rules.word(f'{MARK}<{name}>')} ({either})")

    def _either(self, schema: Any, closing: str, depth: int) -> Iterator[str]:
        types, end = types_of(schema, self._root), self._rules.word(closing)
        cases = cases_of(schema, self._root)
        if not types or "string" in types:  # it is read as text
            yield text_of(self._rules, cases, closing, may_be_null="null" in types)
            return
        if {"array", "object"} <= types:
            raise NotEnforced("a type that is array or object is not enforced")
        for case in cases:
            kinds = ["enum"] if constants_of(case) is not None else sorted(types_of(case, {}))
            for kind in kinds:
                if kind == "object":
                    yield f"{self.members({**case, 'type': kind}, depth)} {end}"
                elif kind == "array":
                    yield f"{self._items(case, depth)} {end}"
                else:
                    typed: Schema = case if kind == "enum" else {**case, "type": kind}
                    yield f"{self._rules.json(typed, self._tool.field)} {end}"

    def _items(self, case: Schema, depth: int) -> str:
        least, most = case.get("minItems", 0), case.get("maxItems")
        if most == 0 or case.get("items") is False:
            return '""'
        item = self._element("item", case.get("items", True), depth + 1)
        return f"{item}{{{least},{'' if most is None else most}}}"
