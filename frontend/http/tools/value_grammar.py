"""Grammars of arguments that are not written as JSON: tags, and Gemma's braces."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from frontend.http.api_errors import ApiError
from frontend.http.tools.rules import OfferedTool, Rules, Schema
from frontend.http.tools.syntax import Field, Part
from frontend.http.tools.tagged import referred, types_of

_ANY_KEY = r"/[A-Za-z_][\w-]{0,40}/"
_MOST_DEPTH = 16


def tagged_parameters(rules: Rules, parameter: Sequence[Part], tool: OfferedTool) -> str:
    """One tag a property, in their order."""
    schema = tool.parameters or {}
    properties = _properties(schema)
    if not properties:
        is_closed = schema.get("additionalProperties") is False
        return '""' if is_closed else f"({_tag(rules, parameter, tool, _ANY_KEY, {}, {})})*"
    tags = []
    for name, each in properties.items():
        key = json.dumps(name, ensure_ascii=False)
        tag = rules.new(_tag(rules, parameter, tool, key, each, schema), kind="tag")
        tags.append(tag if name in schema.get("required", ()) else f"{tag}?")
    return " ".join(tags)


def _tag(
    rules: Rules,
    parameter: Sequence[Part],
    tool: OfferedTool,
    key: str,
    schema: Schema,
    root: Schema,
) -> str:
    value = parameter.index(Field("value"))
    types = types_of(schema, root)
    is_text = not types or "string" in types
    found: list[str] = []
    before = ""
    for part in parameter[:value]:
        if isinstance(part, str):
            found += rules.words(part)
            before = part
        elif part.name == "key":
            found.append(key)
        elif before.endswith('string="'):
            found.append('"true"' if is_text else '"false"')
        else:
            found.append(json.dumps("string" if is_text else next(iter(types))))
    closing = "".join(part for part in parameter[value + 1 :] if isinstance(part, str))
    where = f"{tool.field}.properties.{key.strip(chr(34))}"
    if is_text:
        found.append(_text(rules, schema, closing, where))
    else:
        defs: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
        found += [rules.json({**defs, **schema}, where), *rules.words(closing)]
    return " ".join(found)


def _text(rules: Rules, schema: Schema, closing: str, field: str) -> str:
    """Text as a schema wants it, and `closing`."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in choices]
        either = " | ".join(json.dumps(each, ensure_ascii=False) for each in texts)
        return f"({either}) {' '.join(rules.words(closing))}"
    if "format" in schema:
        raise ApiError(
            400,
            f"{field}: a format is not enforced where this model writes text without quotes; say "
            "it as a pattern, or use tool_choice auto without strict",
            param="tools",
        )
    pattern = r"(.|\n)*"
    if isinstance(own := schema.get("pattern"), str):
        begin = "" if own.startswith("^") else pattern
        end = "" if own.endswith("$") else pattern
        core = own.removeprefix("^").removesuffix("$").replace("/", r"\/")
        pattern = f"{begin}({core}){end}"
    elif "minLength" in schema or "maxLength" in schema:
        pattern = rf"(.|\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return rules.any_text(closing, pattern)


def braced(rules: Rules, quote: str, tool: OfferedTool) -> str:
    """Keys in the order of the alphabet, as the template writes them."""
    return _Braces(rules, quote, tool).object(tool.parameters or {}, 0)


class _Braces:
    def __init__(self, rules: Rules, quote: str, tool: OfferedTool) -> None:
        self._rules, self._quote, self._tool = rules, quote, tool
        self._any = ""

    def object(self, schema: Schema, depth: int) -> str:
        properties = _properties(schema)
        if not properties:
            is_closed = schema.get("additionalProperties") is False
            pair = f'{_ANY_KEY} ":" {self.anything()}'
            return '"{}"' if is_closed else f'"{{" ({pair} ("," {pair})*)? "}}"'
        required = schema.get("required", ())
        pairs = [
            (
                f"{json.dumps(name + ':', ensure_ascii=False)} {self._value(each, depth + 1)}",
                name not in required,
            )
            for name, each in sorted(properties.items())
        ]
        inside = self._rules.separated(pairs, '","')
        return f'"{{" {inside} "}}"'

    def anything(self) -> str:
        """Any value."""
        if not self._any:
            self._any = name = f"any_{self._quote.strip('<>|')}".rstrip('_"').lower() + "_value"
            pair = f'{_ANY_KEY} ":" {name}'
            number = self._rules.json({"type": ["number", "boolean", "null"]}, self._tool.field)
            self._rules.add(
                name,
                f"{self._string({})} | {number}"
                f' | "{{" ({pair} ("," {pair})*)? "}}" | "[" ({name} ("," {name})*)? "]"',
            )
        return self._any

    def _value(self, schema: Any, depth: int) -> str:
        root = self._tool.parameters or {}
        if depth > _MOST_DEPTH:
            why = f"{self._tool.field} is nested too deeply; make it flatter"
            raise ApiError(400, why, param=self._tool.field)
        if isinstance(schema, dict) and isinstance(ref := schema.get("$ref"), str):
            return self._value(referred(ref, root), depth + 1)
        if not isinstance(schema, dict):
            return self.anything()
        return self._rules.new(" | ".join(self._either(schema, root, depth)), kind="value")

    def _either(self, schema: Schema, root: Schema, depth: int) -> Iterator[str]:
        if "enum" in schema or "const" in schema:
            for each in schema.get("enum", [schema.get("const")]):
                text = json.dumps(each, ensure_ascii=False)
                quoted = [*self._rules.words(self._quote), text, *self._rules.words(self._quote)]
                yield " ".join(quoted) if isinstance(each, str) else json.dumps(text)
            return
        if several := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
            for each in several:
                yield self._value(each, depth + 1)
            return
        types = sorted(types_of(schema, root))
        if not types:
            yield self.anything()
        for each in types:
            if each == "string":
                yield self._string(schema)
            elif each == "object":
                yield self.object(schema, depth)
            elif each == "array":
                item = self._value(schema.get("items"), depth + 1)
                least, most = schema.get("minItems", 0), schema.get("maxItems")
                more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
                some = f"({item} {more})" + ("?" if not least else "")
                yield '"[]"' if most == 0 else f'"[" {some} "]"'
            else:
                yield self._rules.json({**schema, "type": each}, self._tool.field)

    def _string(self, schema: Schema) -> str:
        opening = self._rules.words(self._quote)
        return " ".join([*opening, _text(self._rules, schema, self._quote, self._tool.field)])


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
