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
_MOST_CHARS = 2**17
"""All rules together, each with those that it names written out."""


class _NotRegular(Exception):
    """The grammar needs more than a regular expression, or than is read here."""


def regex_of_lark(grammar: str) -> str | None:
    """What the rule `start` matches; None: no regular expression is known that says it."""
    if len(grammar) > _MOST_CHARS:
        return None
    try:
        return _Grammar(grammar).pattern("start")
    except (_NotRegular, RecursionError):
        return None


class _Grammar:
    def __init__(self, grammar: str) -> None:
        imported = _IMPORT.findall(grammar)
        self._known = {name: _COMMON[name] for name in imported if name in _COMMON}
        self._bodies: dict[str, list[str]] = {}
        """Tokens of each rule."""
        self._within: list[str] = []
        self._num_chars = 0
        self._read(_IMPORT.sub("", grammar))

    def _read(self, grammar: str) -> None:
        tokens: list[str] = []
        at = 0
        while at < len(grammar):
            token = _TOKEN.match(grammar, at)
            if token is None:
                raise _NotRegular
            at = token.end()
            if token["colon"]:
                tokens = self._bodies.setdefault(token["name"].lstrip("?!"), [])
            elif token["string"] or token["regex"] or token["name"] or token["sign"]:
                tokens.append(token[0])

    def pattern(self, name: str) -> str:
        """The regular expression of a rule."""
        if name not in self._known:
            if name in self._within or name not in self._bodies:
                raise _NotRegular
            self._within.append(name)
            pieces = []
            for token in self._bodies[name]:
                pieces.append(self._piece(token))
                self._num_chars += len(pieces[-1])
                if self._num_chars > _MOST_CHARS:
                    raise _NotRegular
            self._within.pop()
            self._known[name] = "".join(pieces)
        return f"(?:{self._known[name]})"

    def _piece(self, token: str) -> str:
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
        return self.pattern(token)


def _unescaped(text: str) -> str:
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
    return re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), text)
