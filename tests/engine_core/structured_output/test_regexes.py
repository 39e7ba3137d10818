"""What a regular expression unrolls to, before anything compiles it."""

import pytest

from engine_core.structured_output.regexes import RegexTooLarge, check_regex


@pytest.mark.parametrize(
    "pattern",
    [
        "a{20000}",
        "a{20000,}",
        "a{3,20000}",
        "(a{100}){200}",
        "x{19999}y",
        r"\{30000}",
        "[{]{20000}",
        "a{ 20000 }",
        r"\(?x{19998}",
        "(?i)a{19996}",
        "[[:alpha:]]{3}",
        r"[\[a]{20000}",
    ],
)
def test_up_to_the_limit_it_is_taken(pattern):
    check_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "a{20001}",
        "a{20001,}",
        "a{100000,}",
        "a{1,20001}",
        "a{0,20001}",
        "(a{101}){200}",
        "(?:ab){10001}",
        "[a-z]{20001}",
        r"\d{20001}",
        "x{20000}y",
        "((a{30}){30}){30}",
        "(x{20001})",
        "(x{20001}",
        "a{ 20001 }",
        "(x{1000})?{1000}",
        "(x{1000})*{1000}",
        "(x{1000}){1}?{1000}",
        "a{ 1 , 20001 }",
        "a{20001 ,}",
        "([[:alpha:](]x{1000}){1000}",
    ],
)
def test_beyond_the_limit_it_is_refused(pattern):
    with pytest.raises(RegexTooLarge, match="the limit is 20000; repeat less"):
        check_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(?x)(a{1000}) {1000}", "the flag x"),
        ("(?ix: a {1000}) {1000}", "the flag x"),
        ("(a{1000}[a[b](]){1000}", "a class within the class"),
        ("[a-z&&[^x]]", "a class within the class"),
    ],
)
def test_what_hides_repetitions_is_refused(pattern, what):
    """Spaces before a number, and parentheses that a nested class holds."""
    with pytest.raises(RegexTooLarge, match=f"has {what}.*; write it without"):
        check_regex(pattern)
