"""What a regular expression unrolls to: repetitions within repetitions multiply, and a lexer would
spend seconds on a few characters."""

import re

_MAX_SIZE = 20_000
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}|.", re.DOTALL)
_NUMBER = re.compile(r"\d+")


class RegexTooLarge(ValueError):
    """It unrolls to more than is taken."""


def check_regex(pattern: str) -> None:
    """Raises RegexTooLarge: with bounded repetitions written out it has more characters and classes
    than the limit: `x(ab{3}){4}` has 1 + 4 * (1 + 3)."""
    sizes, last = [0], 0
    """Of each open group, and of what a repetition would repeat."""
    for match in _PART.finditer(pattern):
        part = match[0]
        if part == "(":
            sizes.append(0)
            continue
        if part == ")":
            last = sizes.pop() if len(sizes) > 1 else 0
        elif part[0] == "{" and len(part) > 1:
            number = max(1, *map(int, _NUMBER.findall(part)))
            sizes[-1] += last * (number - 1)
            last *= number
            continue
        else:
            last = 1
        sizes[-1] += last
    if (size := max(sizes)) > _MAX_SIZE:
        raise RegexTooLarge(
            f"{pattern[:100]!r} unrolls to {size} characters, the limit is {_MAX_SIZE}; repeat less"
        )
