"""Grammars of arguments that are not written as JSON: tags, and Gemma's braces."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from frontend.http.api_errors import ApiError
from frontend.http.tools.braces import read_key
from frontend.http.tools.rules import OfferedTool, Rules
from frontend.http.tools.schema_cases import (
    NotEnforced,
    Schema,
    cases_of,
    constants_of,
    embedded,
    not_enforced,
    objects_of,
    types_of,
    whole_regex,
)
from frontend.http.tools.syntax import CallSyntax, Field
from frontend.http.tools.tagged import TaggedArguments

_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_-]{0,40}/"
_MOST_DEPTH = 60
_TEXT_KEYS = ("pattern", "minLength", "maxLength")


def tagged_parameters(rules: Rules, syntax: CallSyntax, tool: OfferedTool) -> str:
    """One tag a property, in their order."""
    root = tool.parameters or {}
    cases = []
    try:
        for properties, others in objects_of(root, root):
            tags = [
                rules.new(_tag(rules, syntax, tool, name, each), kind="tag") + "?" * may_lack
                for name, each, may_lack in properties
            ]
            if not tags and others is not False:
                tags = [f"({_tag(rules, syntax, tool, None, others)})*"]
            cases.append(" ".join(tags) or '""')
    except NotEnforced as error:
        raise not_enforced(tool.field, error) from None
    return one_of(rules, cases)


def one_of(rules: Rules, cases: Sequence[str]) -> str:
    """
    Raises:
        NotEnforced: there is none.
    """
    if not cases:
        raise NotEnforced("a schema that nothing is of is not enforced")
    return cases[0] if len(cases) == 1 else rules.new(" | ".join(dict.fromkeys(cases)), kind="case")


def _tag(rules: Rules, syntax: CallSyntax, tool: OfferedTool, name: str | None, schema: Any) -> str:
    root, parameter = tool.parameters or {}, syntax.parameter
    value = parameter.index(Field("value"))
    types = types_of(schema, root)
    is_text = not types or "string" in types
    found: list[str] = []
    before = ""
    if name is not None and not TaggedArguments(syntax, "", None).reads_key(name):
        raise NotEnforced(f"a property cannot be named {name!r:.100}")
    for part in parameter[:value]:
        if isinstance(part, str):
            found += rules.words(part)
            before = part
        elif part.name == "key":
            found.append(_ANY_KEY if name is None else json.dumps(name, ensure_ascii=False))
        elif before.endswith('string="'):
            found.append('"true"' if is_text else '"false"')
        else:
            found.append(json.dumps("string" if is_text else min(types)))
    closing = "".join(part for part in parameter[value + 1 :] if isinstance(part, str))
    if is_text:
        opening, end = syntax.wrapped
        may_be_null = Field("type") not in parameter and not opening
        text = text_of(rules, cases_of(schema, root), end + closing, may_be_null=may_be_null)
        found += [*rules.words(opening), text]
    else:
        where = tool.field if name is None else f"{tool.field}.properties.{name}"
        found += [rules.json(embedded(schema, root), where), *rules.words(closing)]
    return " ".join(found)


def text_of(
    rules: Rules, cases: Sequence[Schema], closing: str, *, may_be_null: bool = False
) -> str:
    """Text as one of the cases wants it, and `closing`. Raises NotEnforced."""
    found, end = [], rules.word(closing)
    for case in cases:
        types, values = types_of(case, {}), _values(case)
        texts = [each for each in values or () if isinstance(each, str)]
        found += [f"{json.dumps(each, ensure_ascii=False)} {end}" for each in texts]
        if values is None and (not types or "string" in types):
            found.append(rules.any_text(closing, *_patterns(case)))
        if may_be_null and ("null" in types if values is None else None in values):
            found.append(f'"null" {end}')
    return one_of(rules, found)


def _values(case: Schema) -> list[Any] | None:
    """Those of `enum` or `const` that are of its type; None: it has neither. Raises NotEnforced."""
    values = constants_of(case)
    if values is None:
        return None
    if wrong := [key for key in _TEXT_KEYS if key in case]:
        raise NotEnforced(f"{wrong[0]} beside enum is not enforced")
    types = types_of({"type": case.get("type", [])}, {})
    names = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
    return [
        each
        for each in values
        if not types
        or names.get(type(each), "number") in types
        or (type(each) is int and "integer" in types)
    ]


_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_FORMATS = {
    "date": "[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)"
    "|(0[13578]|1[02])-31)|[0-9]{2}(0[48]|[2468][048]|[13579][26])-02-29",
    "time": rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+([.-][A-Za-z0-9]+)*",
    "uri": r"[a-z]{2,8}:\/\/[A-Za-z0-9.-]+(:[0-9]{1,5})?(\/[A-Za-z0-9_.~!$&*+,;=:@\/?#%-]*)?",
}
_FORMATS["date-time"] = f"({_FORMATS['date']})T{_FORMATS['time']}"


def _patterns(case: Schema) -> list[str]:
    """Regular expressions that a text matches, all of them."""
    found = []
    if (kind := case.get("format")) is not None:
        if kind not in _FORMATS:
            raise NotEnforced(
                f"format {kind!r:.100}, beside {', '.join(_FORMATS)}, is not enforced"
            )
        found.append(_FORMATS[kind])
    if isinstance(own := case.get("pattern"), str):
        found.append(whole_regex(own))
    if "minLength" in case or "maxLength" in case:
        found.append(rf"(.|\n){{{case.get('minLength', 0)},{case.get('maxLength', '')}}}")
    return found


def braced(rules: Rules, quote: str, tool: OfferedTool) -> str:
    """Keys in the order of the alphabet, as the template writes them."""
    try:
        return _Braces(rules, quote, tool).objects(tool.parameters or {}, 0)
    except NotEnforced as error:
        raise not_enforced(tool.field, error) from None


class _Braces:
    """Raises NotEnforced."""

    def __init__(self, rules: Rules, quote: str, tool: OfferedTool) -> None:
        self._rules, self._quote, self._tool = rules, quote, tool
        self._root = tool.parameters or {}
        self._any = ""
        self._referred: dict[str, str] = {}
        """Rules by references: a schema may lead to itself."""

    def objects(self, schema: Schema, depth: int) -> str:
        found = []
        for properties, others in objects_of(schema, self._root):
            if wrong := [name for name, *_ in properties if read_key(name, self._quote) != name]:
                raise NotEnforced(f"a property cannot be named {wrong[0]!r:.100}")
            pairs = [
                (
                    f"{json.dumps(name + ':', ensure_ascii=False)} {self._value(each, depth + 1)}",
                    may_lack,
                )
                for name, each, may_lack in sorted(properties, key=lambda each: each[0])
            ]
            if not pairs and others is not False:
                pair = f'{_ANY_KEY} ":" {self._value(others, depth + 1)}'
                pairs = [(f'{pair} ("," {pair})*', True)]
            found.append(f'"{{" {self._rules.separated(pairs, chr(34) + "," + chr(34))} "}}"')
        return one_of(self._rules, found)

    def anything(self) -> str:
        """Any value."""
        if not self._any:
            self._any = name = self._rules.new("", kind="any")
            pair = f'{_ANY_KEY} ":" {name}'
            number = self._rules.json({"type": ["number", "boolean", "null"]}, self._tool.field)
            self._rules.add(
                name,
                f"{self._string([{}])} | {number}"
                f' | "{{" ({pair} ("," {pair})*)? "}}" | "[" ({name} ("," {name})*)? "]"',
            )
        return self._any

    def _value(self, schema: Any, depth: int) -> str:
        if depth > _MOST_DEPTH:
            why = f"{self._tool.field} is nested too deeply; make it flatter"
            raise ApiError(400, why, param=self._tool.field)
        ref = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        if isinstance(ref, str) and ref in self._referred:
            return self._referred[ref]
        if not isinstance(ref, str):
            return self._rules.new(" | ".join(self._either(schema, depth)), kind="value")
        self._referred[ref] = name = self._rules.new("", kind="value")
        return self._rules.add(name, " | ".join(self._either(schema, depth)))

    def _either(self, schema: Any, depth: int) -> Iterator[str]:
        for case in cases_of(schema, self._root):
            types, values = types_of(case, {}), _values(case)
            for each in values or ():
                text = json.dumps(each, ensure_ascii=False)
                mark = self._rules.word(self._quote)
                yield f"{mark} {text} {mark}" if isinstance(each, str) else json.dumps(text)
            if values is not None:
                continue
            if not types:
                yield self.anything()
            for each in sorted(types):
                if each == "string":
                    yield self._string([{**case, "type": each}])
                elif each == "object":
                    yield self.objects({**case, "type": each}, depth)
                elif each == "array":
                    yield self._array(case, depth)
                else:
                    yield self._rules.json({**case, "type": each}, self._tool.field)

    def _array(self, case: Schema, depth: int) -> str:
        least, most = case.get("minItems", 0), case.get("maxItems")
        if most == 0 or case.get("items") is False:
            return '"[]"'
        item = self._value(case.get("items", True), depth + 1)
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        some = f"({item} {more if most != 1 else ''})" + "?" * (not least)
        return f'"[" {some} "]"'

    def _string(self, cases: Sequence[Schema]) -> str:
        text = text_of(self._rules, cases, self._quote)
        return f"{self._rules.word(self._quote)} {text}"
