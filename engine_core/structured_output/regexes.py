"""Regular expressions before they are compiled: what one unrolls to (repetitions within repetitions
multiply, and a lexer would spend seconds on a few characters), and what its classes are."""

import re

_MAX_SIZE = 20_000
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\s*\d+\s*(?:,\s*\d*\s*)?\}|.", re.DOTALL)
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_VERBOSE = re.compile(r"\?[a-zA-Z]*x")
_NUMBER = re.compile(r"\d+")


_ASCII = {r"\d": "0-9", r"\w": "0-9A-Za-z_", r"\s": r" \t\n\r\f\v"}


class RegexTooLarge(ValueError):
    """It unrolls to more than is taken, or that cannot be counted."""


def check_regex(pattern: str) -> None:
    """Raises RegexTooLarge: with bounded repetitions written out it has more characters and classes
    than the limit: `x(ab{3}){4}` has 1 + 4 * (1 + 3). Or parts of it might hide from the count."""
    pattern = _POSIX_CLASS.sub("a", pattern)
    sizes, last = [0], 0
    """Sizes of each open group, and of what a repetition would repeat."""
    for match in _PART.finditer(pattern):
        part = match[0]
        is_verbose = part == "(" and _VERBOSE.match(pattern, match.end())
        if is_verbose or (part[0] == "[" and "[" in _ESCAPE.sub("", part[1:])):
            what = "the flag x" if is_verbose else f"a class within the class {part[:20]!r}"
            raise RegexTooLarge(f"{pattern[:100]!r} has {what}; write it without")
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
        elif part in "*+?":
            sizes[-1] += 1
            continue  # `x?{9}` repeats what `x{9}` does
        else:
            last = 1
        sizes[-1] += last
    if (size := max(sizes)) > _MAX_SIZE:
        raise RegexTooLarge(
            f"{pattern[:100]!r} unrolls to {size} characters, the limit is {_MAX_SIZE}; repeat less"
        )


def with_ascii_classes(pattern: str) -> str:
    r"""Its \d, \w and \s are ASCII, but in classes that exclude them: Unicode's differ from
    language to language and from version to version, these are of all of them."""
    parts = []
    for match in _PART.finditer(pattern):
        part = match[0]
        if part in _ASCII:
            part = f"[{_ASCII[part]}]"
        elif part[0] == "[" and part[1:2] != "^" and "[" not in part[1:]:
            part = re.sub(r"\\.", lambda escape: _ASCII.get(escape[0], escape[0]), part)
        parts.append(part)
    return "".join(parts)
