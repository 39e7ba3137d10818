"""Regular expressions and context-free grammars, each made of a seed; and whether a text is of such
a grammar, found without the library under test."""

import functools
import json
import random
import re
from dataclasses import dataclass

_ATOMS = (
    "a", "b", "xy", "é", "🙂", r"\d", r"\w", r"\.", "[a-f]", "[^a-z\\n]", "[é-ü]", " ", "-", ".",
    r"\s", "[0-9A-F]", r"\\", r"\[", '"', "[\\]^-]",
)  # fmt: skip
_TIMES = ("", "", "?", "*", "+", "{2}", "{1,3}", "{2,}", "*?", "+?", "{0,4}")


def make_regex(seed: int) -> str:
    """For `re.fullmatch` as for Rust."""
    draw = random.Random(seed)
    pattern = _regex(draw, draw.randint(1, 3))
    if draw.random() < 0.2:
        pattern = f"^(?:{pattern})$"
    return f"(?i){pattern}" if draw.random() < 0.1 else pattern


def _regex(draw: random.Random, depth: int) -> str:
    parts = []
    for _ in range(draw.randint(1, 4)):
        atom = draw.choice(_ATOMS)
        if depth and draw.random() < 0.5:
            atom = f"{draw.choice(('(', '(?:'))}{_regex(draw, depth - 1)})"
        elif len(atom) > 1 and atom.isalpha():
            atom = f"({atom})"
        parts.append(atom + draw.choice(_TIMES))
    text = "".join(parts)
    return f"{text}|{_regex(draw, 0)}" if draw.random() < 0.3 else text


@dataclass(frozen=True)
class Node:
    """kind: text, class, sequence, either, several (a range of times), rule."""

    kind: str
    value: object = None
    parts: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Grammar:
    """`rules[0]` is the start. A rule refers to itself behind a text alone, so nothing recurs
    without end."""

    rules: tuple[Node, ...]

    def as_lark(self) -> str:
        names = ["start", *(f"r{number}" for number in range(1, len(self.rules)))]
        return "\n".join(
            f"{name}: {_written(rule, names, 'lark')}"
            for name, rule in zip(names, self.rules, strict=True)
        )

    def as_gbnf(self) -> str:
        names = ["root", *(f"r{number}" for number in range(1, len(self.rules)))]
        return "\n".join(
            f"{name} ::= {_written(rule, names, 'gbnf')}"
            for name, rule in zip(names, self.rules, strict=True)
        )

    def allows(self, text: str) -> bool:
        @functools.cache
        def ends(node: Node, start: int) -> frozenset[int]:
            match node.kind:
                case "text":
                    return frozenset(
                        {start + len(node.value)} if text.startswith(node.value, start) else ()
                    )
                case "class":
                    return frozenset({start + 1} if re.match(node.value, text[start:]) else ())
                case "rule":
                    return ends(self.rules[node.value], start)
                case "either":
                    return frozenset().union(*(ends(part, start) for part in node.parts))
                case "sequence":
                    return _after(node.parts, start)
            least, most = node.value
            found, now = set(), {start}
            for times in range((len(text) + 1 if most is None else most) + 1):
                if times >= least:
                    if now <= found:
                        break
                    found |= now
                now = {end for at in now for end in ends(node.parts[0], at)}
            return frozenset(found)

        def _after(parts: tuple[Node, ...], start: int) -> frozenset[int]:
            now = {start}
            for part in parts:
                now = {end for at in now for end in ends(part, at)}
            return frozenset(now)

        return len(text) in ends(Node("rule", 0), 0)


def make_grammar(seed: int) -> Grammar:
    draw = random.Random(seed)
    number = draw.randint(1, 4)
    return Grammar(tuple(_rule(draw, at, number) for at in range(number)))


def _rule(draw: random.Random, at: int, number: int) -> Node:
    node = _node(draw, draw.randint(1, 3), at, number)
    if draw.random() < 0.5:  # into itself, or back to an earlier one
        back = Node("rule", draw.randint(0, at))
        again = Node("sequence", parts=(Node("text", draw.choice("([<,")), back, Node("text", ")")))
        node = Node("either", parts=(node, again))
    return node


def _node(draw: random.Random, depth: int, at: int, number: int) -> Node:
    if not depth:
        if at + 1 < number and draw.random() < 0.4:
            return Node("rule", draw.randint(at + 1, number - 1))
        if draw.random() < 0.3:
            return Node("class", draw.choice(("[a-c]", "[0-9]", "[^a-z]", "[é-ü_]")))
        return Node("text", draw.choice(("if ", "a", "b", "::", "é🙂", '"q"', "end", "\n", "\\")))
    parts = tuple(_node(draw, depth - 1, at, number) for _ in range(draw.randint(1, 3)))
    if len(parts) == 1 and draw.random() < 0.7:
        return parts[0]
    match draw.randrange(3) if len(parts) > 1 else 2:
        case 0:
            return Node("sequence", parts=parts)
        case 1:
            return Node("either", parts=parts)
    if parts[0].kind == "several":  # the GBNF converter loses the brackets between two counts
        return parts[0]
    return Node("several", draw.choice(((0, 1), (0, None), (1, None), (2, 2), (1, 3))), parts[:1])


def _written(node: Node, names: list[str], form: str) -> str:
    parts = [_written(part, names, form) for part in node.parts]
    match node.kind:
        case "text":
            return json.dumps(node.value, ensure_ascii=False)
        case "class":
            return f"/{node.value}/" if form == "lark" else node.value
        case "rule":
            return names[node.value]
        case "sequence":
            return "(" + " ".join(parts) + ")"
        case "either":
            return "(" + " | ".join(parts) + ")"
    least, most = node.value
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get(node.value)
    counted = f"~{least}..{most}" if form == "lark" else f"{{{least},{most}}}"
    return f"({parts[0]}){short or counted}"
