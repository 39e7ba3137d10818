"""GBNF, as llama.cpp reads it, in Lark's form."""

import json
import re
from dataclasses import dataclass, field

from engine_core.structured_output.grammar_error import GrammarError

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_OR = re.compile(rf"{_LINES.pattern}\|{_LINES.pattern}")
"""An "or", also on the next line, where llama.cpp wants it on the same."""
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_COUNT = re.compile(r"[*+?]|\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}")
_TOKEN = re.compile(r"!?<(\[\d+\]|[^<>\s]+)>")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([tnr\\\"\[\]]))")
_LETTERS = {"t": "\t", "n": "\n", "r": "\r"}
_MAX_NESTING = 100


@dataclass(slots=True)
class _Rule:
    body: str = ""
    needs: set[str] = field(default_factory=set)
    """Rules that it names."""
    has_tokens: bool = False


def gbnf_to_lark(text: str) -> tuple[str, dict[str, str]]:
    """The grammar, and its rules' names as they were sent. A rule that leads to itself, or to one
    that does, is a rule; the others are terminals, which llguidance is quick at.
    Raises GrammarError, with the line."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GrammarError("it has no rule root, with which a text begins")
    if missing := {need for rule in rules.values() for need in rule.needs} - rules.keys():
        raise GrammarError(f"no rule {min(missing)} is defined; define it")
    terminals: set[str] = set()
    num_found = -1
    order = [*rules]
    while len(terminals) > num_found:
        num_found = len(terminals)
        order.reverse()  # rules mostly stand before those that they need
        for name in order:
            if rules[name].needs <= terminals and not rules[name].has_tokens:
                terminals.add(name)
    names = {name: f"{'T' if name in terminals else 'r'}_{n}" for n, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, rule in rules.items():
        body = re.sub("\0([^\0]+)\0", lambda match: names[match[1]], rule.body)
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines), {short: name for name, short in names.items()}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rule = _Rule()
        self._nesting = 0

    def rules(self) -> dict[str, _Rule]:
        """The rules by name; of equal names the last counts."""
        found = {}
        self._skip(_LINES)
        while self._at < len(self._text):
            name = self._take(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                raise self._error("::= was expected")
            self._at += 3
            self._skip(_LINES)
            self._rule = found[name] = _Rule()
            self._rule.body = self._alternatives(_SPACE)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("the end of the rule was expected")
            self._skip(_LINES)
        return found

    def _alternatives(self, space: re.Pattern[str]) -> str:
        found = [self._sequence(space)]
        while more := _OR.match(self._text, self._at):
            self._at = more.end()
            found.append(self._sequence(space))
        return " | ".join(found)

    def _sequence(self, space: re.Pattern[str]) -> str:
        parts: list[str] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)\r\n":
            if count := _COUNT.match(self._text, self._at):
                if not parts:
                    raise self._error(f"nothing stands before {count[0]}, which repeats it")
                self._at = count.end()
                parts[-1] = _repeated(parts[-1], count)
            else:
                parts.append(self._part())
            self._skip(space)
        return " ".join(parts) or '""'

    def _part(self) -> str:
        text, start = self._text, self._at
        if text[start] == '"':
            return json.dumps("".join(self._characters('"')), ensure_ascii=False)
        if text[start] == "[":
            return self._class()
        if text[start] == ".":
            self._at += 1
            return r"/(.|\n)/"
        if text[start] == "(":
            self._nesting += 1
            if self._nesting > _MAX_NESTING:
                raise self._error(f"nested deeper than {_MAX_NESTING} levels; make it flatter")
            self._at += 1
            self._skip(_LINES)
            inner = self._alternatives(_LINES)
            self._take(re.compile(r"\)"), ")")
            self._nesting -= 1
            return f"({inner})"
        if token := _TOKEN.match(text, start):
            self._at = token.end()
            self._rule.has_tokens = True
            if token[0][0] != "!":
                return token[0]
            if token[1][0] != "[":
                raise self._error("the token that is excluded needs its number: !<[7]>")
            return f"<[^{token[1][1:-1]}]>"
        name = self._take(_NAME, "a rule, text or class")[0]
        self._rule.needs.add(name)
        return f"\0{name}\0"

    def _class(self) -> str:
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        self._at -= 1
        found, characters = [], self._characters("]", ranges=True)
        if not characters:
            raise self._error("the class has no characters; name some, or write \\] for a ]")
        for each in characters:
            first, last = each[0], each[-1]
            if first > last:
                raise self._error(f"the range {first}-{last} is empty; turn it round")
            found.append(_hex(first) + (f"-{_hex(last)}" if len(each) > 1 else ""))
        return f"/[{'^' * is_negated}{''.join(found)}]/"

    def _characters(self, end: str, *, ranges: bool = False) -> list[str]:
        """Behind the current character, to `end` and over it; of ranges the first and last."""
        self._at += 1
        found = []
        while not self._text.startswith(end, self._at):
            first = self._character()
            if (
                ranges
                and self._text[self._at : self._at + 2] not in ("-", f"-{end}")
                and (self._text.startswith("-", self._at))
            ):
                self._at += 1
                first += self._character()
            found.append(first)
        self._at += 1
        return found

    def _character(self) -> str:
        if self._at >= len(self._text):
            raise self._error("a text or class has no end")
        if self._text[self._at] != "\\":
            self._at += 1
            return self._text[self._at - 1]
        escape = self._take(_ESCAPE, "an escape: \\xHH, \\uHHHH, \\UHHHHHHHH, \\t, \\n, \\r, \\\\")
        if escape[4]:
            return _LETTERS.get(escape[4], escape[4])
        code = int(escape[1] or escape[2] or escape[3], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"{escape[0]} is no character")
        return chr(code)

    def _take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(f"{what} was expected")
        self._at = match.end()
        return match

    def _skip(self, space: re.Pattern[str]) -> None:
        match = space.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _error(self, why: str) -> GrammarError:
        line = self._text.count("\n", 0, self._at) + 1
        at = self._text[self._at : self._at + 20].partition("\n")[0]
        return GrammarError(f"line {line}, at {at!r}: {why}")


def _repeated(part: str, count: re.Match[str]) -> str:
    part = part if part[0] in '("/\0' and part[-1] in ')"/\0' else f"({part})"
    if count[1] is None:
        return f"({part}{count[0]})"
    least = int(count[1])
    most = least if count[2] is None else None if count[3] is None else int(count[3])
    if most is not None and most < least:
        raise GrammarError(f"{count[0]} repeats at most less than at least; turn it round")
    if most == 0:
        return '""'
    return f"({part}{{{least},{'' if most is None else most}}})"


def _hex(character: str) -> str:
    return f"\\u{{{ord(character):x}}}"
