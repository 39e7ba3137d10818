"""From what a request asks for to a matcher of llguidance. What cannot be enforced is refused by
name; limits bound what a grammar can cost."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine_core.structured_output.regexes import check_regex, with_ascii_classes
from engine_core.structured_output.structural_tags import structural_tag_grammar
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
        if asked.kind is StructuredOutputKind.STRUCTURAL_TAG:
            grammar = _user_grammar(
                structural_tag_grammar(_read(asked.text), self._markers, _json_rule)
            )
        else:
            grammar = _grammar_of(asked)
        if asked.reasoning is None:
            return grammar
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
            return LLMatcher.grammar_from_regex(with_ascii_classes(asked.text))
        case StructuredOutputKind.CHOICE:
            return LLMatcher.grammar_from_lark(_choice(_read(asked.text)))
        case StructuredOutputKind.GRAMMAR:
            is_gbnf = "::=" in asked.text
            return _user_grammar(gbnf_to_lark(asked.text) if is_gbnf else asked.text)
        case StructuredOutputKind.STRUCTURAL_TAG:
            raise AssertionError("it needs the tokenizer")


def _user_grammar(lark: str) -> str:
    no_forcing = json.dumps({"no_forcing": not may_force(lark)})
    return LLMatcher.grammar_from_lark(f"{lark}\n%llguidance {no_forcing}")


_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_JSON_PART = re.compile(r"%json\b.*")
_FREE_TEXT = (r"/(.|\n)*/", r"/([^{\s](.|\n)*)?/", r"/([^\[\s](.|\n)*)?/")
"""More than one character may follow each."""
_DEFINITION = re.compile(r"^\s*[!?]?(\w+)(\[.*\])?[^:\n]*:", re.MULTILINE)
_LOOPING_REGEX = re.compile(r"/.*[*+{].*/")


def may_force(lark: str) -> bool:
    """Whether forced tokens may be looked for. In llguidance 1.9 that never ends, and takes ever
    more memory, where a terminal repeats a text and nothing can follow it, as in `start: A A` with
    `A: /(ab)+/`: the first A takes all. Where a terminal repeats anything it is not done."""
    for part in _FREE_TEXT:
        lark = lark.replace(part, "")
    lark = _JSON_PART.sub("", _STRING.sub("", lark))
    if "%" in lark.replace("%llguidance", "") or _LOOPING_REGEX.search(lark):
        return False
    _, *parts = _DEFINITION.split(lark)  # name, attributes, body, name ...
    return not any(
        set(body) & set("*+~{")
        for name, attributes, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        if attributes or name[0].isupper()
    )


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


def _json_rule(schema: Any) -> str:
    schema = _read(schema) if isinstance(schema, str) else schema
    schema = {} if schema is True else schema
    check_patterns(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _WHITE_SPACE}})}"


@contextlib.contextmanager
def _as_grammar_error(what: str) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{what}: {error}") from None
    except Exception as error:  # of many kinds, whatever is wrong with the user's text
        raise GrammarError(f"{what}: {reason_of(f'{error}')}") from error
