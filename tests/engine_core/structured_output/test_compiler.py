"""Grammars against `jsonschema`, `re` and by hand: what may be written, and what is refused."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from engine_core.structured_output.grammar_error import GrammarError
from protocol.structured_output import ReasoningMarkers, StructuredOutput, StructuredOutputKind
from tests.engine_core.structured_output.schemas import make_schema
from tests.engine_core.structured_output.vocabularies import EOS, VOCAB_SIZE, compiler, tokenizer

KIND = StructuredOutputKind


def compiled(kind, text, **options):
    text = text if isinstance(text, str) else json.dumps(text)
    return compiler().compile(StructuredOutput(kind=kind, text=text, **options)).deep_copy()


def random_text(matcher, seed, most=400, words=()):
    """None if it is not over within so many tokens. It ends as soon as it may, half of the time.
    `words` are written as a whole now and then, where they may stand."""
    draw, token_ids = random.Random(seed), []
    while len(token_ids) < most:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:VOCAB_SIZE])
        assert len(allowed), matcher.get_error()
        may_end = EOS in allowed
        if may_end and (len(allowed) == 1 or draw.random() < 0.5):
            return tokenizer().decode(token_ids)
        if words and draw.random() < 0.3:
            word = tokenizer().encode(draw.choice(words), add_special_tokens=False).ids
            if matcher.validate_tokens(word) == len(word):
                assert matcher.consume_tokens(word)
                token_ids += word
                continue
        token_ids.append(int(draw.choice(allowed[allowed != EOS])))
        assert matcher.consume_token(token_ids[-1])
    return None


def accepts(kind, grammar, text, **options):
    matcher = compiled(kind, grammar, **options)
    token_ids = tokenizer().encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("seed", range(60))
def test_a_text_that_is_drawn_from_a_schemas_grammar_validates(seed):
    schema = make_schema(seed)
    matcher = compiled(KIND.JSON, schema)
    if (text := random_text(matcher, seed)) is not None:
        validator = jsonschema.Draft202012Validator(schema)
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"if": {"const": 1}, "then": {"const": 1}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "format": "regex"}, "format: regex"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "pattern": "^(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "((a{100}){100}){100}"}, "1000000 characters"),
        ({"patternProperties": {"((a{100}){100}){100}": {}}}, "1000000 characters"),
        ({"type": "string", "pattern": "a{100000,}"}, "100000 characters"),
        ({"type": "string", "pattern": "a{1,100000}"}, "100000 characters"),
        ({"$ref": "http://example.org/schema.json"}, "example.org"),
        ({"type": "strong"}, "strong"),
        (False, "object schema"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(schema, keyword):
    with pytest.raises(GrammarError, match=r"^structured_outputs\.json cannot be used: ") as error:
        compiled(KIND.JSON, schema)
    assert keyword in str(error.value)


def test_a_schema_cannot_switch_its_keywords_off():
    schema = {"not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(GrammarError, match='"not"'):
        compiled(KIND.JSON, schema)


def test_white_space_is_little_none_or_what_is_asked_for():
    schema, wide = {"type": "array", "items": {"const": 1}}, "[1,     1]"
    assert accepts(KIND.JSON, schema, "[1, 1]")
    assert accepts(KIND.JSON, schema, "[1,\n    1]")
    assert not accepts(KIND.JSON, schema, wide)
    assert accepts(KIND.JSON, schema, wide, whitespace_pattern=" *")
    assert accepts(KIND.JSON, schema, "[1,1]", disable_any_whitespace=True)
    assert not accepts(KIND.JSON, schema, "[1, 1]", disable_any_whitespace=True)


@pytest.mark.parametrize(
    "pattern",
    [r"\d{3}-[a-f]{2,4}", "(é|🙂)+", "a|b|", r"^x[^y]z$", r"[\w-]{9}\s+[^\d]\D\W", r"\\d\w{20}"],
)
def test_a_regular_expression_is_matched_by_the_whole_text(pattern):
    for seed in range(5):
        text = random_text(compiled(KIND.REGEX, pattern), seed, most=60)
        assert text is None or re.fullmatch(pattern, text)


def test_a_choice_is_one_of_the_strings():
    choices = ["yes", "no", 'no "way"\n', "é"]
    for choice in choices:
        assert accepts(KIND.CHOICE, choices, choice)
    assert not accepts(KIND.CHOICE, choices, "ye")
    assert not accepts(KIND.CHOICE, choices, "yesno")


def test_a_grammar_is_larks_or_gbnf():
    lark = 'start: "a" more?\nmore: "b" start'
    gbnf = 'root ::= "a" more?\nmore ::= "b" root'
    for grammar in (lark, gbnf):
        assert accepts(KIND.GRAMMAR, grammar, "ababa")
        assert not accepts(KIND.GRAMMAR, grammar, "ab")


@pytest.mark.parametrize(
    ("lark", "can_be"),
    [
        ('start: "a" | "b" A A\nA: /(if )+/', False),
        ('start: "a" | "b" A A\nA: "if"\n  | "if "+', False),
        ('start: "a" | "b" r r\nr[lazy]: "if "+', False),
        ('start: "a" | "b" /(if )+/ /(if )+/', False),
        ('start: "a" | "b" %regex { "substring_words": "if" }', False),
        ('root ::= "a" | "b" r r\nr ::= ("if ")+', False),
        ('start: "a" | "b" "if " "/x+/" r+\nr: /\\n?/ "]"', True),
        ('start: "a" | "b" "if " %json {"pattern": "^a+$"}', True),
    ],
)
def test_tokens_are_forced_where_a_terminal_cannot_repeat_for_ever(lark, can_be):
    """The first of these made llguidance look for forced bytes without end, in the step."""
    matcher = compiled(KIND.GRAMMAR, lark)
    matcher.consume_token(tokenizer().token_to_id("b"))
    matcher.compute_bitmask()
    assert bool(matcher.compute_ff_tokens()) == can_be


def test_a_structural_tag_binds_what_follows_a_trigger():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=one>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f="],
    }
    assert accepts(KIND.STRUCTURAL_TAG, tag, "free text")
    assert accepts(KIND.STRUCTURAL_TAG, tag, 'free <f=one>{"x": 1}</f> text')
    assert not accepts(KIND.STRUCTURAL_TAG, tag, "free <f=two>{}</f>")
    assert not accepts(KIND.STRUCTURAL_TAG, tag, 'free <f=one>{"x": "1"}</f>')


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
TAGS = [
    {"begin": "<f=one>", "content": NUMBER, "end": "</f>"},
    {"begin": "<f=two>", "content": ANY, "end": ["</f>", "</g>"]},
]
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
LIST = {"type": "tags_with_separator", "tags": TAGS[:1], "separator": ", "}
ONE = "<f=one>1</f>"


def constant(value):
    return {"type": "const_string", "value": value}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (constant("a<b"), ["a<b"], ["a", "a<bc"]),
        (NUMBER, ["-7"], ["x"]),
        ({"type": "regex", "pattern": r"a/\d{2}"}, ["a/12"], ["a/1"]),
        (ANY, ["", "<f=one>x"], []),
        (CALLS, ["", "so ", f"so {ONE} and <f=two>x</g>.", ONE], ["<f=one>x</f>", "<f=no>"]),
        (CALLS | {"at_least_one": True}, [ONE, ONE + " and so on"], ["", "so", f"so {ONE}"]),
        (CALLS | {"stop_after_first": True}, ["so", f"so {ONE}"], [f"{ONE}{ONE}", f"{ONE}."]),
        (LIST, ["", ONE, f"{ONE}, {ONE}"], [f"{ONE} {ONE}", ", "]),
        (LIST | {"at_least_one": True, "stop_after_first": True}, [ONE], ["", f"{ONE}, {ONE}"]),
        (
            {"type": "sequence", "elements": [constant("a: "), NUMBER, ANY]},
            ["a: 1", "a: 1 x"],
            ["a: "],
        ),
        ({"type": "or", "elements": [constant("a"), NUMBER]}, ["a", "5"], ["a5"]),
        (
            {"type": "tag", "begin": "<t>", "content": CALLS, "end": "</t>"},
            ["<t></t>", f"<t>x{ONE}y{ONE}</t>"],
            ["<t>", "<t></t>x", "<t><f=one></t>"],
        ),
        ({"type": "optional", "content": NUMBER}, ["", "12"], ["x"]),
        ({"type": "star", "content": constant("ab")}, ["", "abab"], ["aba"]),
        ({"type": "plus", "content": constant("ab")}, ["ab", "abab"], [""]),
        (
            {"type": "repeat", "content": constant("ab"), "min": 2, "max": 3},
            ["abab"],
            ["ab", "ab" * 4],
        ),
    ],
)
def test_a_structural_tag_in_xgrammars_formats(form, good, bad):
    tag = {"type": "structural_tag", "format": form}
    for texts, is_good in ((good, True), (bad, False)):
        for text in texts:
            assert accepts(KIND.STRUCTURAL_TAG, tag, text) == is_good, text


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            {"type": "qwen_xml_parameter", "json_schema": {}},
            "'qwen_xml_parameter' is not supported",
        ),
        (
            {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
            "'qwen_xml', which is not",
        ),
        ({"type": "any_text", "excludes": ["a"]}, r"excludes ['a'], which is not enforced"),
        ({"type": "sequence", "elements": [ANY, constant("a")]}, "'any_text' has no end"),
        ({"type": "star", "content": ANY}, "'any_text' has no end"),
        (NUMBER | {"strict": True}, "'json_schema' has no strict"),
        (CALLS | {"triggers": ["x"]}, "no trigger begins '<f=one>'"),
        (CALLS | {"tags": [{"begin": "<f="}]}, "not of its form: 'end'"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, '"not"'),
        ("text", "format None is not supported"),
    ],
)
def test_a_format_that_cannot_be_enforced_is_refused_by_name(form, words):
    with pytest.raises(GrammarError) as error:
        compiled(KIND.STRUCTURAL_TAG, {"format": form})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (KIND.REGEX, "((((", "unclosed group"),
        (KIND.GRAMMAR, "start: start2", "start2"),
        (KIND.GRAMMAR, "root ::= (", "cannot be used"),
        (KIND.CHOICE, "[]", "at least one"),
        (KIND.CHOICE, '[""]', "empty string"),
        (KIND.JSON, "{", "cannot be used"),
        (KIND.JSON, "[" * 100_000, "nested too deeply"),
        (KIND.STRUCTURAL_TAG, "{}", "triggers"),
        (
            KIND.STRUCTURAL_TAG,
            '{"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}',
            "no trigger",
        ),
    ],
)
def test_a_text_that_is_not_of_its_kind_is_refused(kind, text, words):
    with pytest.raises(GrammarError, match=rf"^structured_outputs\.{kind.value}") as error:
        compiled(kind, text)
    assert words in str(error.value)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_grammar_holds_behind_a_block_of_reasoning(is_open):
    """Here its markers are texts of several tokens; tests/e2e/test_reasoning.py has single ones."""
    markers = ReasoningMarkers("<r>", "</r>", is_open=is_open)

    def takes(text, kind=KIND.CHOICE, asked=("red", "green")):
        return accepts(kind, asked, text, reasoning=markers)

    assert takes("<r>red{<r>\n</r>green")
    assert takes("no </r </r>red") == is_open
    assert takes("red") == (not is_open)
    assert not takes("<r>red")
    assert not takes("<r></r>blue")
    for kind, asked, answer in (
        (KIND.JSON, {"type": "integer"}, "7"),
        (KIND.REGEX, "a{3}", "aaa"),
        (KIND.GRAMMAR, 'start: x\nx: "b" x | "c"', "bbc"),
        (KIND.GRAMMAR, 'root ::= "b" root | "c"', "bbc"),
        (
            KIND.STRUCTURAL_TAG,
            {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]},
            "so <f>1</f> it is",
        ),
    ):
        assert takes(f"<r>why</r>{answer}", kind, asked)
        assert not takes(f"<r>why</r>{answer}<f>", kind, asked)
