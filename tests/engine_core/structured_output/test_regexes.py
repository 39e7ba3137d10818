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
        "a{,30000}",
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
    ],
)
def test_beyond_the_limit_it_is_refused(pattern):
    with pytest.raises(RegexTooLarge, match="the limit is 20000; repeat less"):
        check_regex(pattern)
