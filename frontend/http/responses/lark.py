"""A grammar in Lark's format as one regular expression, where it is regular: that can be enforced
inside of a JSON string, too."""

import re

_TOKEN = re.compile(
    r"\s+|//[^\n]*|(?P<string>\"(?:[^\"\\\n]|\\.)*\"i?)|(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imsx]*)"
    r"|(?P<name>[?!]?[A-Za-z_]\w*)(?P<colon>(?:\.\d+)?\s*:)?|->\s*\w+|(?P<sign>[()\[\]|?*+])"
)
_IMPORT = re.compile(r"^%import\s+common\.(\w+)\s*$", re.MULTILINE)
_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+", "DIGIT": "[0-9]", "INT": "[0-9]+", "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+", "CNAME": "[A-Za-z_][A-Za-z0-9_]*", "HEXDIGIT": "[a-fA-F0-9]",
    "NUMBER": r"[0-9]+(?:\.[0-9]+)?", "SIGNED_NUMBER": r"[+-]?[0-9]+(?:\.[0-9]+)?",
}  # fmt: skip
_MOST_CHARS = 2**16


class _NotRegular(Exception):
    """The grammar needs more than a regular expression, or than is read here."""


def regex_of_lark(grammar: str) -> str | None:
    """What the rule `start` matches; None: no regular expression is known that says it."""
    known = {name: _COMMON[name] for name in _IMPORT.findall(grammar) if name in _COMMON}
    try:
        return _pattern("start", _bodies(_IMPORT.sub("", grammar)), known, ())
    except (_NotRegular, RecursionError):
        return None


def _bodies(grammar: str) -> dict[str, list[str]]:
    """The tokens of each rule."""
    found: dict[str, list[str]] = {}
    tokens: list[str] = []
    at = 0
    while at < len(grammar):
        token = _TOKEN.match(grammar, at)
        if token is None:
            raise _NotRegular
        at = token.end()
        if token["colon"]:
            tokens = found.setdefault(token["name"].lstrip("?!"), [])
        elif token["string"] or token["regex"] or token["name"] or token["sign"]:
            tokens.append(token[0])
    return found


def _pattern(
    name: str, bodies: dict[str, list[str]], known: dict[str, str], within: tuple[str, ...]
) -> str:
    if name not in known:
        if name in within or name not in bodies:
            raise _NotRegular
        text = ""
        for token in bodies[name]:
            text += _piece(token, bodies, known, (*within, name))
            if len(text) > _MOST_CHARS:
                raise _NotRegular
        known[name] = text
    return f"(?:{known[name]})"


def _piece(
    token: str, bodies: dict[str, list[str]], known: dict[str, str], within: tuple[str, ...]
) -> str:
    if token[0] == '"':
        if token.endswith("i"):
            raise _NotRegular
        return f"(?:{re.escape(_unescaped(token[1:-1]))})"
    if token[0] == "/":
        body, _, flags = token[1:].rpartition("/")
        if flags:
            raise _NotRegular
        return f"(?:{body.replace(chr(92) + '/', '/')})"
    if token in "()|?*+":
        return "(?:" if token == "(" else token
    if token in "[]":
        return "(?:" if token == "[" else ")?"
    return _pattern(token, bodies, known, within)


def _unescaped(text: str) -> str:
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
    return re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), text)
