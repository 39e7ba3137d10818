"""From what a request asks for to a matcher of llguidance. What cannot be enforced is refused by
name; limits bound what a grammar can cost."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine_core.structured_output.regex_size import check_regex
from protocol.structured_output import StructuredOutput, StructuredOutputKind

_WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
"""As in llama.cpp: a model that likes white space does not fill its answer with it."""
_MAX_REASON_CHARS = 400


class GrammarError(Exception):
    """Why a grammar cannot be used, for the user."""


class GrammarCompiler:
    """For one model's tokens. Takes tenths of a second, holding the interpreter.
    Raises GrammarError: llguidance cannot read this tokenizer.

    Args:
        tokenizer_json: a `tokenizers` document.
        vocab_size: length of a row of logits.
        eos_token_ids: they end an answer where its grammar may end; at least one.
    """

    def __init__(
        self, tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        if not eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, so no grammar could end")
        with _as_grammar_error("this model's tokenizer cannot be used for structured_outputs"):
            self._tokenizer = LLTokenizer(
                tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        self._limits = LLParserLimits(
            max_lexer_states=50_000, step_lexer_fuel=100_000, verbose_errors=False
        )

    def compile(self, asked: StructuredOutput) -> LLMatcher:
        """A matcher at its start; copies of it are used. Its first mask has been made, so that what
        is slow once is not slow in a step. Raises GrammarError."""
        what = f"structured_outputs.{asked.kind.value} cannot be used"
        with _as_grammar_error(what):
            matcher = LLMatcher(
                self._tokenizer, self._grammar_of(asked), limits=self._limits, log_level=0
            )
            if not matcher.is_error():
                matcher.deep_copy().compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"{what}: {reason_of(matcher.get_error())}")
        return matcher

    def _grammar_of(self, asked: StructuredOutput) -> str:
        grammar = _grammar_of(asked)
        if asked.reasoning is None:
            return grammar
        start, end = (self._marker(text) for text in (asked.reasoning.start, asked.reasoning.end))
        if end.startswith("<"):
            rules = [f"thought: TEXT {end}", r"TEXT: /(.|\n)*/"]
        else:
            rules = [rf"thought[suffix={end}]: /(.|\n)*/"]
        may_think = f"{start}? thought" if asked.reasoning.is_open else f"({start} thought)?"
        lark = "\n".join([f"start: {may_think} @answer", *rules])
        is_json = asked.kind in (StructuredOutputKind.JSON, StructuredOutputKind.REGEX)
        answer = json.loads(grammar)["grammars"][0] if is_json else {"lark_grammar": grammar}
        return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]})

    def _marker(self, text: str) -> str:
        """A special token is no text for a grammar."""
        first, *more = self._tokenizer.tokenize_str(text, parse_special=True)
        is_special = not more and self._tokenizer.is_special_token(first)
        return f"<[{first}]>" if is_special else json.dumps(text)


def reason_of(text: str) -> str:
    """llguidance's reason without its state."""
    text = text.partition("\n<state>")[0].strip()
    unknown = text.removeprefix("Unimplemented keys: ")
    if unknown != text:
        text = f"the keywords {unknown} are not enforced; remove them, and check the answer"
    return text[:_MAX_REASON_CHARS]


def _grammar_of(asked: StructuredOutput) -> str:
    match asked.kind:
        case StructuredOutputKind.JSON:
            check_patterns(_read(asked.text))
            return LLMatcher.grammar_from_json_schema(asked.text, overrides=_json_options(asked))
        case StructuredOutputKind.REGEX:
            check_regex(asked.text)
            return LLMatcher.grammar_from_regex(asked.text)
        case StructuredOutputKind.CHOICE:
            return LLMatcher.grammar_from_lark(_choice(_read(asked.text)))
        case StructuredOutputKind.GRAMMAR:
            is_gbnf = "::=" in asked.text
            lark = gbnf_to_lark(asked.text) if is_gbnf else asked.text
            return LLMatcher.grammar_from_lark(lark)
        case StructuredOutputKind.STRUCTURAL_TAG:
            return LLMatcher.grammar_from_lark(_structural_tag(_read(asked.text)))


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


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError("it is nested too deeply; make it flatter") from None


def check_patterns(schema: Any) -> None:
    """Of a JSON schema, wherever they are. Raises GrammarError: see `check_regex`."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(pattern := part.get("pattern"), str):
                check_regex(pattern)
            patterns = part.get("patternProperties")
            for pattern in patterns if isinstance(patterns, dict) else ():
                check_regex(pattern)
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _choice(choices: Any) -> str:
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise GrammarError("it must be a list of strings, at least one")
    if "" in choices:
        raise GrammarError("it holds an empty string; remove it")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _structural_tag(given: Any) -> str:
    """vLLM's `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`."""
    structures = given.get("structures") if isinstance(given, dict) else None
    if not structures or "format" in given:
        raise GrammarError(
            'it must have "structures" (a list of {"begin", "schema", "end"}) and "triggers"; no '
            "other form is supported"
        )
    tags = []
    for structure in structures:
        begin = structure["begin"]
        trigger = next((t for t in given["triggers"] if t and begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(f"no trigger begins {begin!r:.100}; name one in triggers")
        schema = structure.get("schema") or structure.get("structural_tag") or {}
        schema = _read(schema) if isinstance(schema, str) else schema
        check_patterns(schema)
        schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    return StructTag.to_grammar(tags, assume_special=False)


@contextlib.contextmanager
def _as_grammar_error(what: str) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{what}: {error}") from None
    except Exception as error:  # of many kinds, whatever is wrong with the user's text
        raise GrammarError(f"{what}: {reason_of(f'{error}')}") from error
