"""Rules of a grammar in Lark's format, as llguidance reads it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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


class Rules:
    """The rules of one grammar, as they are made."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lines = [r"TEXT: /(.|\n)*/"]

    def add(self, name: str, body: str) -> str:
        """Returns the name."""
        if body:
            self._lines.append(f"{name}: {body}")
        return name

    def new(self, body: str, *, kind: str = "part", is_lazy: bool = False) -> str:
        """The name of a new rule."""
        name = f"{kind}_{len(self._lines)}"
        self.add(name + "[lazy]" * is_lazy, body)
        return name

    @cached_property
    def _tokens(self) -> re.Pattern[str] | None:
        added = self._tokenizer.backend.get_added_tokens_decoder().values()
        texts = [each.content for each in added if each.special or each.content.startswith("<")]
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if texts else None

    def words(self, text: str) -> list[str]:
        """Text as it is. A special token is no text for a grammar, nor is an added one in angle
        brackets; a line break may be missing."""
        found = []
        for number, piece in enumerate(self._tokens.split(text) if self._tokens else [text]):
            if number % 2:
                found.append(f"<[{self._tokenizer.backend.token_to_id(piece)}]>")
            elif piece:
                found.append(r"/\n?/" if piece == "\n" else json.dumps(piece, ensure_ascii=False))
        return found

    def any_text(self, closing: str, pattern: str = r"(.|\n)*") -> str:
        """Text up to `closing`, with that."""
        ends = self.words(closing)
        text = f"/{pattern}/"
        if ends[0].startswith("<"):
            return " ".join([text, *ends])
        return " ".join([self.new(f"{text} {ends[0]}", kind="text", is_lazy=True), *ends[1:]])

    def any_of(self, calls: Sequence[str]) -> str:
        """A rule that is one of them."""
        return self.new(" | ".join([self.new(call, kind="call") for call in calls]), kind="call")

    def json_objects(self, tools: Sequence[OfferedTool], keys: Sequence[str]) -> str:
        """One call, whichever: `{"name": ..., "arguments": {...}}`."""
        calls = []
        for tool in tools:
            name, head = json.dumps(tool.name), "{"
            head += f'"{keys[0]}": {name}, "{keys[1]}": ' if keys else f"{name}: "
            arguments = self.json(tool.parameters, tool.field, is_object=True)
            calls.append(f'{json.dumps(head)} {arguments} "}}"')
        return self.any_of(calls)

    def python_list(
        self, tools: Sequence[OfferedTool], has_one_call: bool, *, is_bare: bool = False
    ) -> str:
        """`[f(a=1), g()]`; `is_bare`: one a line."""
        calls = [f'"{tool.name}(" {self.keywords(tool)} ")"' for tool in tools]
        call = self.any_of(calls)
        between = '"\\n"' if is_bare else '", "'
        calls_of_it = self.new(several(call, f"{between} {call}", has_one_call), kind="calls")
        return calls_of_it if is_bare else f'"[" {calls_of_it} "]"'

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

    def keywords(self, tool: OfferedTool) -> str:
        """`key="value", other=1`: the properties in their order. Values are JSON, with names of
        constants that the reader of calls knows and escapes that Python has too."""
        schema = tool.parameters or {}
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
        pairs = []
        for name, each in properties.items():
            whole = {**shared, **(each if isinstance(each, dict) else {})}
            value = self.json(
                whole, f"{tool.field}.properties.{name}", json_allowed_escapes=_ESCAPES
            )
            pairs.append((f'"{name}=" {value}', name not in schema.get("required", ())))
        return self.separated(pairs, '", "')

    def separated(self, pairs: Sequence[tuple[str, bool]], separator: str) -> str:
        """Texts in their order, those with True only maybe."""
        first = more = '""'
        for body, may_lack in reversed(pairs):
            begun = f"{body} {more}"
            behind = f"{separator} {begun}"
            first = self.new(f"{begun} | {first}" if may_lack else begun, kind="first")
            more = self.new(f"{behind} | {more}" if may_lack else behind, kind="more")
        return first

    def text(self) -> str:
        return "\n".join(["%llguidance {}", *self._lines])


def several(first: str, more: str, has_one_call: bool) -> str:
    """One, or any number of them with `more` before each but the first."""
    return first if has_one_call else f"{first} ({more})*"
