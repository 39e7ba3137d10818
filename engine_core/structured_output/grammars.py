"""From what a request asks for to the text of a grammar of llguidance. What cannot be enforced is
refused by name; limits bound what a grammar can cost."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from engine_core.structured_output.gbnf import gbnf_to_lark
from engine_core.structured_output.grammar_error import GrammarError
from engine_core.structured_output.lark import check_rules, json_parts, may_force
from engine_core.structured_output.regexes import check_regex, with_ascii_classes
from engine_core.structured_output.schemas import (
    FIELD,
    Parts,
    check_schema,
    place_of,
    read_json,
    write_json,
)
from engine_core.structured_output.structural_tags import structural_tag_grammar
from protocol.structured_output import StructuredOutput, StructuredOutputKind

_WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
"""As in llama.cpp: a model that likes white space does not fill its answer with it."""
_MAX_REASON_CHARS = 400


class GrammarText:
    """Of one thing that was asked for. Raises GrammarError.

    Attributes:
        text: for an LLMatcher.
    """

    def __init__(self, asked: StructuredOutput, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._schemas: list[tuple[str | None, str, Parts]] = []
        """What the user calls each, for llguidance alone, and its parts."""
        self._names: dict[str, str] = {}
        """Names as the user wrote them, of rules that have others here."""
        grammar = self._grammar_of(asked)
        self.text = grammar if asked.reasoning is None else self._behind(asked, grammar)

    def error(self, message: str, check: Callable[[str], str]) -> GrammarError:
        """Of llguidance's, with the place as far as it is known. `check`: its message about a
        grammar, "" if there is none."""
        field, parts = self._schemas[0][::2] if len(self._schemas) == 1 else (None, Parts())
        if len(self._schemas) > 1:
            for each, grammar, its_parts in self._schemas:
                if alone := check(grammar):
                    message, field, parts = alone, each, its_parts
                    break
        reason, keywords = reason_of(self._with_sent_names(message))
        return GrammarError(place_of(parts, keywords) + reason, field=field)

    def _grammar_of(self, asked: StructuredOutput) -> str:
        match asked.kind:
            case StructuredOutputKind.JSON:
                return self._schema(read_json(asked.text), _json_options(asked))
            case StructuredOutputKind.REGEX:
                check_regex(asked.text)
                return LLMatcher.grammar_from_regex(with_ascii_classes(asked.text))
            case StructuredOutputKind.CHOICE:
                return LLMatcher.grammar_from_lark(_choice(read_json(asked.text)))
            case StructuredOutputKind.STRUCTURAL_TAG:
                lark = structural_tag_grammar(read_json(asked.text), self._markers, self._json_rule)
            case StructuredOutputKind.GRAMMAR if "::=" in asked.text:
                lark, self._names = gbnf_to_lark(asked.text)
            case StructuredOutputKind.GRAMMAR:
                lark = self._with_checked_schemas(asked.text)
        try:
            check_rules(lark)
        except GrammarError as error:
            raise GrammarError(self._with_sent_names(f"{error}")) from None
        no_forcing = json.dumps({"no_forcing": not may_force(lark)})
        return LLMatcher.grammar_from_lark(f"{lark}\n%llguidance {no_forcing}")

    def _with_sent_names(self, message: str) -> str:
        return re.sub(r"\b[rT]_\d+\b", lambda it: self._names.get(it[0], it[0]), message)

    def _behind(self, asked: StructuredOutput, grammar: str) -> str:
        """A block of reasoning."""
        assert asked.reasoning is not None
        start, end = (
            " ".join(self._markers(text)) for text in (asked.reasoning.start, asked.reasoning.end)
        )
        if end.startswith("<"):
            rules = [f"thought: TEXT {end}", r"TEXT: /(.|\n)*/"]
        else:
            rules = [rf"thought[suffix={end}]: /(.|\n)*/"]
        may_think = f"{start}? thought" if asked.reasoning.is_open else f"({start} thought)?"
        lark = "\n".join([f"start: {may_think} @answer", *rules])
        is_json = asked.kind in (StructuredOutputKind.JSON, StructuredOutputKind.REGEX)
        answer = json.loads(grammar)["grammars"][0] if is_json else {"lark_grammar": grammar}
        return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]})

    def _schema(self, schema: Any, options: Any) -> str:
        """The schema as a grammar. Raises GrammarError."""
        field = schema.pop(FIELD, None) if isinstance(schema, dict) else None
        try:
            parts = check_schema(schema)
        except GrammarError as error:
            raise GrammarError(f"{error}", field=field) from None
        grammar = LLMatcher.grammar_from_json_schema(write_json(schema), overrides=options)
        self._schemas.append((field, grammar, parts))
        return grammar

    def _with_checked_schemas(self, lark: str) -> str:
        parts, at = [], 0
        for start, end in json_parts(lark):
            schema = read_json(lark[start:end])
            self._schema(schema, schema.get("x-guidance") or {})
            parts += [lark[at:start], write_json(schema)]
            at = end
        return "".join([*parts, lark[at:]])

    def _json_rule(self, schema: Any) -> str:
        """A rule for the schema of a structural tag."""
        schema = read_json(schema) if isinstance(schema, str) else schema
        schema = {} if schema is True else {**schema}
        options = {"whitespace_pattern": _WHITE_SPACE}
        self._schema(schema, options)
        return f"%json {write_json({**schema, 'x-guidance': options})}"

    def _markers(self, text: str) -> list[str]:
        """Of a grammar, the special tokens in a text and the texts between: for a grammar a special
        token is none."""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        parts = []
        for is_special, run in itertools.groupby(tokens, self._tokenizer.is_special_token):
            if is_special:
                parts += [f"<[{token}]>" for token in run]
            else:
                parts.append(json.dumps(self._tokenizer.decode_str([*run])))
        return parts


def reason_of(text: str) -> tuple[str, list[str]]:
    """llguidance's reason without its state, and the keywords that it names."""
    text = re.split(r"\n<(?:state|non-verbose)", text)[0].strip()
    found = re.search(r"Unimplemented keys: (\[[^\]]*\])", text)
    if found is None:
        named = {"Unknown format": "format", "oneOf constraints": "oneOf"}
        keywords = [keyword for words, keyword in named.items() if words in text]
        if len(text) > _MAX_REASON_CHARS:
            text = f"{text[: _MAX_REASON_CHARS // 2]} ... {text[-_MAX_REASON_CHARS // 2 :]}"
        return text, keywords
    keywords = json.loads(found[1])
    return f"the keywords {found[1]} are not enforced; remove them, and check the answer", keywords


def _json_options(asked: StructuredOutput) -> Any:
    """All of them: a schema may carry its own, among them one that drops keywords silently."""
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not asked.disable_any_whitespace,
        "whitespace_pattern": None
        if asked.disable_any_whitespace
        else (asked.whitespace_pattern or _WHITE_SPACE),
        "coerce_one_of": False,
        "lenient": False,
    }


def _choice(choices: Any) -> str:
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise GrammarError("it must be a list of strings, at least one")
    if "" in choices:
        raise GrammarError("it holds an empty string; remove it")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)
