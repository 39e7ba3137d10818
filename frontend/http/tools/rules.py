"""Rules of a grammar in Lark's format, as llguidance reads it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from typing import Any

from frontend.http.api_errors import ApiError
from frontend.http.tools.schema_cases import (
    NotEnforced,
    Schema,
    embedded,
    not_enforced,
    objects_of,
)
from frontend.text.tokenizer import Tokenizer

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
        self._num_names = 0

    def add(self, name: str, body: str) -> str:
        """Returns the name."""
        if body:
            self._lines.append(f"{name}: {body}")
        return name

    def new(self, body: str, *, kind: str = "part", is_lazy: bool = False) -> str:
        """The name of a new rule; an empty body is added later."""
        self._num_names += 1
        name = f"{kind}_{self._num_names}"
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

    def word(self, text: str) -> str:
        """The `words` of a text, one behind the other."""
        return " ".join(self.words(text))

    def any_text(self, closing: str, *patterns: str) -> str:
        """Text up to `closing`, with that; `patterns`: it matches all of them."""
        rest = closing.lstrip()
        blank, word = closing[: len(closing) - len(rest)].replace("\n", r"\n"), rest.rstrip()
        ends = self.words(word)
        is_token = ends[0].startswith("<")
        free = patterns or (r"(.|\n)*",)
        text = " & ".join(
            f"/({each}){blank}/" if is_token and blank else f"/{each}/" for each in free
        )
        if len(patterns) > 1:
            text = self.add(self.new("", kind="TEXT"), text)
        ends += self.words(rest[len(word) :])  # none of it is text
        if is_token:
            return " ".join([text, *ends])
        ended = f'{text} "{blank}" {ends[0]}' if blank else f"{text} {ends[0]}"
        return " ".join([self.new(ended, kind="text", is_lazy=True), *ends[1:]])

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
        root = tool.parameters or {}
        cases = []
        try:
            for properties, others in objects_of(root, root):
                names = [*tool.name.split("."), *(name for name, *_ in properties)]
                self._check_names(tool, names)
                pairs = [
                    (f'"{name}=" {self._value(tool, name, each)}', may_lack)
                    for name, each, may_lack in properties
                ]
                if not pairs and others is not False:
                    pair = f'/[a-z][a-z_]{{0,40}}/ "=" {self._value(tool, "", others)}'
                    pairs = [(f'{pair} (", " {pair})*', True)]
                cases.append(self.separated(pairs, '", "'))
        except NotEnforced as error:
            raise not_enforced(tool.field, error) from None
        return self.new(" | ".join(cases), kind="case") if cases[1:] else cases[0]

    def _check_names(self, tool: OfferedTool, names: Sequence[str]) -> None:
        if wrong := [name for name in names if not name.isidentifier() or iskeyword(name)]:
            raise ApiError(
                400,
                f"tools: {wrong[0]!r:.100} of {tool.name!r:.100} is no name in Python, in which "
                "this model writes calls; rename it, or use tool_choice auto without strict",
                param="tools",
            )

    def _value(self, tool: OfferedTool, name: str, schema: Any) -> str:
        field = f"{tool.field}.properties.{name}" if name else tool.field
        schema = embedded(schema, tool.parameters or {})
        return self.json(schema, field, json_allowed_escapes=_ESCAPES)

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
