"""What an answer must be, so that its tool calls are what was asked for: a grammar, in Lark's
format, of calls as the model's family writes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from frontend.http.api_errors import ApiError
from frontend.text.tokenizer import Tokenizer

Schema = dict[str, Any]
_FIELD = "x-field"
"""The key in a schema of a grammar that says what the engine's errors call it."""
_WHITE_SPACE = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}

_ESCAPES = 'bfnrt"\\\\'


@dataclass(frozen=True)
class OfferedTool:
    """`is_strict`: its arguments must follow `parameters`, which errors call `field`."""

    name: str
    parameters: Schema | None
    is_strict: bool = False
    field: str = "tools"


def chosen_tool(tools: Sequence[OfferedTool], name: str) -> list[OfferedTool]:
    """
    Raises:
        ApiError: there is none of this name.
    """
    found = [tool for tool in tools if tool.name == name]
    if not found:
        names = ", ".join(tool.name for tool in tools) or "none"
        raise ApiError(
            400, f"tool_choice names {name!r:.100}, the tools are {names}", param="tool_choice"
        )
    return found


def calls_grammar(
    call_format: str,
    tools: Sequence[OfferedTool],
    tokenizer: Tokenizer,
    *,
    must_call: bool,
    has_one_call: bool,
    template: str,
    answer: Schema | None,
    answer_field: str = "answer",
) -> str | None:
    """None: the answer needs none.

    Args:
        call_format: a name in `stream.FORMATS`.
        must_call: there is no answer without a call, and all arguments follow their schemas.
        answer: what it must be if it calls nothing.
        answer_field: what errors call that.

    Raises:
        ApiError: not with this format.
    """
    if not must_call and answer is None and not any(tool.is_strict for tool in tools):
        return None
    if call_format not in _FORMS:
        raise ApiError(
            400,
            f"tools: calls in the format {call_format} are free: strict ones, a tool_choice that "
            "asks for one and a response_format beside them are not supported; omit these",
            param="tools",
        )
    rules = _Rules(tokenizer)
    follows = {tool.name for tool in tools if must_call or tool.is_strict}
    arguments = [
        rules.keywords(tool, schema or {})
        if call_format == "pythonic"
        else rules.json(schema, tool.field, is_object=True)
        for tool in tools
        for schema in (tool.parameters if tool.name in follows else None,)
    ]
    names = [tool.name for tool in tools]
    head, calls = _FORMS[call_format](rules, names, arguments, has_one_call, template)
    if must_call:
        rules.add("start", f"{head} {calls}")
    elif answer is not None:
        rules.add("start", f"{head} {calls} | {rules.json(answer, answer_field)}")
    elif head and head.startswith("<"):
        rules.add("start", f"TEXT {head} {calls} TEXT | TEXT")
    elif head:
        rules.add("start", f"begun {calls} TEXT | TEXT")
        rules.add("begun[lazy]", f"TEXT {head}")
    else:
        rules.add("start", f"{calls} | OTHER")
        opening = "\\[" if call_format == "pythonic" else "{"
        rules.add("OTHER", rf"/([^{opening}\s](.|\n)*)?/")
    return rules.text()


class _Rules:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lines = [r"TEXT: /(.|\n)*/"]

    def add(self, name: str, body: str) -> str:
        if body:
            self._lines.append(f"{name}: {body}")
        return name

    def marker(self, text: str) -> str:
        """A special token is no text for a grammar, nor is an added one in angle brackets."""
        added = self._tokenizer.backend.get_added_tokens_decoder()
        token_id = self._tokenizer.backend.token_to_id(text)
        is_special = token_id in added and (added[token_id].special or text.startswith("<"))
        return f"<[{token_id}]>" if is_special else json.dumps(text)

    def json(
        self, schema: Schema | None, field: str, *, is_object: bool = False, **options: str
    ) -> str:
        whole = {**({"type": "object"} if is_object else {}), **(schema or {}), _FIELD: field}
        try:
            text = json.dumps({**whole, "x-guidance": {**_WHITE_SPACE, **options}})
        except RecursionError:
            why = f"{field} is nested too deeply; make it flatter"
            raise ApiError(400, why, param=field) from None
        return f"%json {text}"

    def keywords(self, tool: OfferedTool, schema: Schema) -> str:
        """`key="value", other=1`: the properties in their order. Values are JSON, with names of
        constants that the reader of calls knows and escapes that Python has too."""
        properties = schema.get("properties") or {}
        names = [*tool.name.split("."), *properties]
        if wrong := [name for name in names if not name.isidentifier() or iskeyword(name)]:
            raise ApiError(
                400,
                f"tools: {wrong[0]!r:.100} of {tool.name!r:.100} is no name in Python, in which "
                "this model writes calls; rename it, or use tool_choice auto without strict",
                param="tools",
            )
        if not properties:
            value = self.json(None, tool.field, json_allowed_escapes=_ESCAPES)
            pair = f'/[a-z][a-z_]{{0,40}}/ "=" {value}'
            is_closed = schema.get("additionalProperties") is False
            return '""' if is_closed else f'({pair} (", " {pair})*)?'
        shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        first = more = '""'
        for name, each in reversed(properties.items()):
            whole = {**shared, **(each if isinstance(each, dict) else {})}
            value = self.json(
                whole, f"{tool.field}.properties.{name}", json_allowed_escapes=_ESCAPES
            )
            pair = f'"{name}=" {value} {more}'
            may_lack = name not in schema.get("required", ())
            number = len(self._lines)
            first = self.add(f"first_{number}", f"{pair} | {first}" if may_lack else pair)
            body = f'", " {pair} | {more}' if may_lack else f'", " {pair}'
            more = self.add(f"more_{number}", body)
        return first

    def text(self) -> str:
        return "\n".join(["%llguidance {}", *self._lines])


def _objects(rules: _Rules, names: list[str], arguments: list[str], key: str) -> str:
    """One call, whichever: `{"name": ..., key: {...}}`."""
    heads = (json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ') for name in names)
    return _any(rules, [f'{head} {each} "}}"' for head, each in zip(heads, arguments, strict=True)])


def _any(rules: _Rules, calls: list[str]) -> str:
    names = [rules.add(f"call_{number}", call) for number, call in enumerate(calls)]
    return rules.add("call", " | ".join(names))


def _several(first: str, more: str, has_one_call: bool) -> str:
    return first if has_one_call else f"{first} ({more})*"


def _hermes(
    rules: _Rules, names: list[str], arguments: list[str], has_one_call: bool, template: str
) -> tuple[str, str]:
    call = _objects(rules, names, arguments, "arguments")
    start, end = rules.marker("<tool_call>"), rules.marker("</tool_call>")
    body = rules.add("body", rf"/\n?/ {call} /\n?/ {end}")
    return start, _several(body, rf"/\n?/ {start} {body}", has_one_call)


def _llama3_json(
    rules: _Rules, names: list[str], arguments: list[str], has_one_call: bool, template: str
) -> tuple[str, str]:
    call = _objects(rules, names, arguments, "parameters")
    return "", _several(call, f"/; ?/ {call}", has_one_call)


def _mistral(
    rules: _Rules, names: list[str], arguments: list[str], has_one_call: bool, template: str
) -> tuple[str, str]:
    start = rules.marker("[TOOL_CALLS]")
    if "[ARGS]" not in template:
        call = _objects(rules, names, arguments, "arguments")
        calls = _several(call, f"/, ?/ {call}", has_one_call)
        return start, f'"[" {calls} "]"'
    then = rules.marker("[ARGS]")
    pairs = zip(map(json.dumps, names), arguments, strict=True)
    call = _any(rules, [f"{name} {then} {each}" for name, each in pairs])
    return start, _several(call, f"{start} {call}", has_one_call)


def _pythonic(
    rules: _Rules, names: list[str], arguments: list[str], has_one_call: bool, template: str
) -> tuple[str, str]:
    pairs = zip(names, arguments, strict=True)
    call = _any(rules, [f'"{name}(" {each} ")"' for name, each in pairs])
    calls = rules.add("calls", _several(call, f'", " {call}', has_one_call))
    return "", f'"[" {calls} "]"'


_FORMS = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
}
