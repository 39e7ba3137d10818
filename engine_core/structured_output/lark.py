"""What is read of a grammar in llguidance's Lark before it is compiled."""

import json
import re
from collections.abc import Iterator

from engine_core.structured_output.grammar_error import GrammarError

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*|\#[^\n]*|\n(?:\s|//[^\n]*\n|\#[^\n]*\n)*(?=\|))|(?P<line>\n)
    |(?P<json>%(?:json|regex|llguidance)\b\s*(?={))|(?P<other>%[^\n]*|->[ \t]*\w+)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/\w*|<[^<>\n]+>|@[\w-]+)
    |(?P<name>[!?]?[A-Za-z_]\w*)|(?P<repeat>[?*+]|~[ \t]*\d+(?:\.\.\d+)?|\{[\d, \t]*\})
    |(?P<sign>[()\[\]|:&~.,=\d-])""",
    re.VERBOSE,
)
_MAX_DEPTH = 400
_Tokens = list[tuple[str, str]]

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_FREE_TEXT = (r"/(.|\n)*/", r"/([^{\s](.|\n)*)?/", r"/([^\[\s](.|\n)*)?/")
"""More than one character may follow each."""
_DEFINITION = re.compile(r"^\s*[!?]?(\w+)(\[.*\])?[^:\n]*:", re.MULTILINE)
_LOOPING_REGEX = re.compile(r"/.*[*+{].*/")
_JSON_PART = re.compile(r"%json\b.*")


def json_parts(lark: str) -> Iterator[tuple[int, int]]:
    """The places of the schemas of `%json`."""
    for kind, start, end in _tokens(lark):
        if kind == "schema" and lark[:start].rstrip().endswith("%json"):
            yield start, end


def check_rules(lark: str) -> None:
    """Raises GrammarError: the rules lead deeper into each other than the limit, or there is one
    that a text can follow and that always needs itself again. What is not of a form that is known
    here is left to llguidance."""
    rules: dict[str, _Tokens] = {}
    name, body = "", list[tuple[str, str]]()
    for kind, start, end in [*_tokens(lark), ("line", 0, 0)]:
        if kind == "unknown":
            return
        if kind != "line":
            body.append((kind, lark[start:end]))
            continue
        if ("sign", ":") in body and body[0][0] == "name":
            colon = body.index(("sign", ":"))
            name = body[0][1].lstrip("!?")
            rules[name] = body[colon + 1 :]
        body = []
    needs = {
        name: [text for kind, text in body if kind == "name" and text in rules]
        for name, body in rules.items()
    }
    reached = _reached(needs)
    known: set[str] = set()
    names = [name for name in rules if name in reached]
    while True:
        num_known = len(known)
        names.reverse()
        for name in names:
            if name not in known and _is_finite(rules[name], rules, known):
                known.add(name)
        if len(known) == num_known:
            break
    if len(known) < len(names):
        seen: set[str] = set()
        name = next(name for name in rules if name in reached and name not in known)
        while name not in seen:  # to one that leads to itself
            seen.add(name)
            name = next(need for need in needs[name] if need not in known)
        raise GrammarError(
            f"no finite text is of the rule {name}: it always needs itself again; let it "
            "have an alternative that does not"
        )


def _reached(needs: dict[str, list[str]]) -> set[str]:
    """The rules that are reached from `start`, as deep as llguidance goes."""
    reached: set[str] = set()
    pending = [("start", 0)]
    while pending:
        name, depth = pending.pop()
        if name in reached or name not in needs:
            continue
        if depth > _MAX_DEPTH:
            raise GrammarError(
                f"its rules lead deeper than {_MAX_DEPTH} into each other, at {name}; make it "
                "flatter"
            )
        reached.add(name)
        pending += [(need, depth + 1) for need in reversed(needs[name])]
    return reached


def _is_finite(body: _Tokens, rules: dict[str, _Tokens], known: set[str]) -> bool:
    """Whether some finite text is of it, if some is of the rules `known`."""
    stack: list[tuple[bool, bool]] = []
    done, here, last = False, True, True  # an alternative before, this one, its last part
    for kind, text in body:
        if kind == "repeat":
            least = re.search(r"\d+", text)
            last |= text in "?*" or (least is not None and int(least[0]) == 0)
            continue
        if text in ("(", "["):
            stack.append((done, here and last))
            done, here, last = False, True, True
        elif text == "|":
            done, here, last = done or (here and last), True, True
        elif text in (")", "]") and stack:
            inner = done or (here and last) or text == "]"
            done, here = stack.pop()
            last = inner
        else:
            here, last = here and last, kind != "name" or text not in rules or text in known
    return done or (here and last)


def _tokens(lark: str) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end; without space. What is not known is one for each character."""
    at, decoder = 0, json.JSONDecoder()
    while at < len(lark):
        match = _TOKEN.match(lark, at)
        if match is None:
            yield "unknown", at, at + 1
            at += 1
            continue
        kind, start = str(match.lastgroup), at
        at = match.end()
        if kind == "json":
            start = at
            try:
                _, at = decoder.raw_decode(lark, at)
            except (ValueError, RecursionError):
                raise GrammarError(f"at {lark[at : at + 40]!r}: no JSON object follows") from None
            kind = "schema"
        if kind != "space":
            yield kind, start, at


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
