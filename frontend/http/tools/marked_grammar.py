"""Grammars of the formats that `formats.toml` describes."""

import json
from collections.abc import Mapping, Sequence

from frontend.http.tools.rules import OfferedTool, Rules, several
from frontend.http.tools.syntax import CallSyntax, Field, Part
from frontend.http.tools.value_grammar import braced, tagged_parameters

_LISTS = frozenset({"objects", "object_lines", "python", "python_lines"})
"""Fields that hold all calls."""
_BODIES = _LISTS | {"object", "arguments", "parameters", "braces"}


def marked_calls(
    rules: Rules,
    syntax: CallSyntax,
    tools: Sequence[OfferedTool],
    has_one_call: bool,
    template: str,
) -> tuple[str, str]:
    """The first word of all calls, and the rest of them."""
    call = syntax.spelled(template)
    first, fields = (call[0], call[1:]) if isinstance(call[0], str) else ("", call)
    opening = rules.words(syntax.begin or first)
    head, rest = ("", opening) if not opening else (opening[0], opening[1:])
    body = _body(rules, syntax, fields, tools, has_one_call)
    begun = [*rules.words(first), body] if syntax.begin else [body]
    again = [*rules.words(syntax.between + first), body]
    closing = rules.words(syntax.end)
    is_list = any(isinstance(part, Field) and part.name in _LISTS for part in call)
    more = "" if is_list or has_one_call else f"({' '.join(again)})*"
    return head, " ".join([*rest, *begun, more, *closing])


def _body(
    rules: Rules,
    syntax: CallSyntax,
    fields: Sequence[Part],
    tools: Sequence[OfferedTool],
    has_one_call: bool,
) -> str:
    """A call, or a list of them, behind the first words."""
    where = next(part.name for part in fields if isinstance(part, Field) if part.name in _BODIES)
    if where in _LISTS | {"object"}:
        if where.startswith("python"):
            wrapped = rules.python_list(tools, has_one_call, is_bare=where == "python_lines")
        else:
            call = rules.json_objects(tools, syntax.keys)
            between = r"/\n/" if where == "object_lines" else r"/, ?/"
            wrapped = several(call, f"{between} {call}", has_one_call or where == "object")
            wrapped = f'"[" {wrapped} "]"' if where == "objects" else wrapped
        return _spelled(rules, fields, {where: wrapped})
    calls = []
    for tool in tools:
        filled = {"name": json.dumps(tool.name), "id": "/[a-zA-Z0-9]{9}/", "index": "/[0-9]{1,3}/"}
        if where == "arguments":
            filled[where] = rules.json(tool.parameters, tool.field, is_object=True)
        elif where == "parameters":
            filled[where] = tagged_parameters(rules, syntax, tool)
        else:
            filled[where] = braced(rules, syntax.quote, tool)
        calls.append(_spelled(rules, fields, filled))
    return rules.any_of(calls)


def _spelled(rules: Rules, fields: Sequence[Part], filled: Mapping[str, str]) -> str:
    found: list[str] = []
    for part in fields:
        found += rules.words(part) if isinstance(part, str) else [filled[part.name]]
    return " ".join(found)
