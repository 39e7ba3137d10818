"""GBNF as llama.cpp reads it; and what the rules of a grammar are refused for."""

import pytest

from engine_core.structured_output.gbnf import gbnf_to_lark
from engine_core.structured_output.grammar_error import GrammarError
from engine_core.structured_output.lark import check_rules, json_parts
from protocol.structured_output import StructuredOutputKind
from tests.engine_core.structured_output.test_compiler import accepts, compiled

GRAMMAR = StructuredOutputKind.GRAMMAR


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        (r"root ::= [\u00e9]", ["é"], ["e", "u"]),
        (r"root ::= [a-z\u00C0-\u00FF]{3}", ["aéz"], ["aé", "aéA"]),
        (r'root ::= "\x41\u00e9\U0001F642\t\n\r\\\"\[\]"', ['Aé🙂\t\n\r\\"[]'], ["A"]),
        (
            r"root ::= [\x41-\x43\U0001F642\]\[\\^-]",
            ["B", "🙂", "]", "[", "\\", "^", "-"],
            ["D", "x"],
        ),
        (r"root ::= [-a-c] [a-c-] [^\]a-]", ["--b", "ab^"], ["aaa", "aa]", "aa-"]),
        ('root ::= [/"] "/" .', ['"/\n', "//é"], ["//"]),
        ('root ::= start\nstart ::= "x"', ["x"], ["y"]),
        ('root ::= "a"{0} "b"{2} "c"{1,} "d"{0,1}', ["bbc", "bbccd"], ["abbc", "bb", "bbcdd"]),
        ('root ::= (("a"{2}){1,2}){0,}', ["", "aa", "aaaaaa"], ["aaa"]),
        ('root ::= "abc"* "d"', ["d", "abcabcd"], ["abccd"]),
        ('root ::= | "a"\n', ["", "a"], ["aa"]),
        ('root ::= "" x\nx ::= ("a" | ) "b"', ["ab", "b"], ["a"]),
        (
            'root ::= # the start\n  "a" | # or\n  ("b" # in brackets\n "c")\n\n# end',
            ["a", "bc"],
            ["b"],
        ),
        ('root ::= "a"\n  | my-rule\r\nmy-rule ::= "b-"', ["a", "b-"], ["my-rule"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
        ('root ::= T_0 r_1\nT_0 ::= "q"\nr_1 ::= "a" r_1 | "b"', ["qb", "qaab"], ["q"]),
        ('root ::= "a" root? "b"', ["ab", "aabb"], ["aab"]),
    ],
)
def test_gbnf_is_read_as_llama_cpp_does(gbnf, good, bad):
    for texts, is_good in ((good, True), (bad, False)):
        for text in texts:
            assert accepts(GRAMMAR, gbnf, text) == is_good, text


@pytest.mark.parametrize(
    ("gbnf", "words"),
    [
        ("root ::= x", "no rule x is defined"),
        ('x ::= "a"', "no rule root"),
        ('root ::= "a"\nroot = "b"', "line 2, at '= \"b\"': ::= was expected"),
        (r'root ::= "\q"', "line 1, at '\\\\q\"': an escape"),
        (r"root ::= [\ud800]", r"\ud800 is no character"),
        ("root ::= [z-a]", "the range z-a is empty"),
        ("root ::= []", "the class has no characters"),
        ('root ::= "a', "has no end"),
        ('root ::= ("a"', ") was expected"),
        ('root ::= "a")', "the end of the rule was expected"),
        ("root ::= *", "nothing stands before *"),
        ('root ::= "a"{3,1}', "{3,1} repeats"),
        ("root ::= " + "(" * 200, "nested deeper than 100"),
        ("root ::= my-rule\nmy-rule ::= my-rule", "no finite text is of the rule my-rule"),
    ],
)
def test_errors_speak_of_the_grammar_that_was_sent(gbnf, words):
    with pytest.raises(GrammarError) as error:
        compiled(GRAMMAR, gbnf)
    assert words in str(error.value)


def test_a_token_is_kept_as_it_is():
    assert gbnf_to_lark("root ::= <[7]> !<[8]> <|end|>")[0] == (
        "start: r_0\nr_0: <[7]> <[^8]> <|end|>"
    )


@pytest.mark.parametrize(
    ("lark", "rule"),
    [
        ("start: start", "start"),
        ('start: "a" start', "start"),
        ('start: "x" | more\nmore: "a" (more | more "b")', "more"),
        ("start: a\na: b+\nb: a", "a"),
        ('start: A\nA: "x" B\nB: A', "A"),
    ],
)
def test_a_rule_that_can_never_end_is_refused(lark, rule):
    with pytest.raises(GrammarError, match=f"no finite text is of the rule {rule}:"):
        check_rules(lark)


@pytest.mark.parametrize(
    "lark",
    [
        'start: "a" start | "b"',
        'start: "a" start\n  // a note\n  | "b"',
        'start: "a" [start]',
        'start: "a" start? b*\nb: b',
        'start: start~0..2 "x"',
        'start: "a" (start | "b")',
        'start: INT start | "|" ":"\n%import common.INT\nunused: unused',
        'start: %json {"const": "|"} | start',
        "start: /a:b|c/ | <[5]> start",
        'begun[lazy]: /x/ "start"\nstart: begun',
    ],
)
def test_a_rule_that_can_end_is_not_refused(lark):
    if "b: b" in lark:
        with pytest.raises(GrammarError, match="the rule b:"):
            check_rules(lark)
    else:
        check_rules(lark)


def test_chains_of_rules_and_of_terminals_are_bounded():
    for name in "aA":
        rules = [f"{name}{n}: {name}{n + 1}" for n in range(10_000)]
        with pytest.raises(GrammarError, match=f"deeper than 400 into each other, at {name}400"):
            check_rules("\n".join([f"start: {name}0", *rules, f'{name}10000: "x"']))


def test_schemas_within_a_grammar_are_found_where_no_text_holds_them():
    lark = 'start: "%json {}" %json\n {"a": "\\"}"} /%json {}/ // %json {}\n'
    assert [lark[start:end] for start, end in json_parts(lark)] == ['{"a": "\\"}"}']
