"""What structured outputs, tools and chats are asked for: schemas, regular expressions, grammars,
structural tags and chat templates that are long, deep, endless, empty or of extreme numbers."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.fuzz.server.cases import Case, chat, post_json, size

_NUMBERS = (
    0,
    1,
    -1,
    2**31,
    2**53 - 1,
    2**53 + 1,
    -(2**63),
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    1e300,
    -1e300,
    5e-324,
    0.1,
    1e16,
    -0.0,
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_PATTERNS = (
    "a",
    "(a|b)*",
    "[^\\s\\S]",
    "(a{100}){100}",
    "a{100000,}",
    "(" * 3000 + ")" * 3000,
    "^é+$",
)


def schema(rng: Random, depth: int = 0) -> Any:
    """Any JSON schema, right or wrong."""
    if depth == 0 and rng.random() < 0.5:
        return _large_schema(rng)

    def number() -> Any:
        return rng.choice(_NUMBERS)

    def some(words: Sequence[str], share: float) -> dict[str, Any]:
        return {word: number() for word in words if rng.random() < share}

    kinds: tuple[Callable[[], Any], ...] = (
        lambda: {"type": rng.choice(("integer", "number")), **some(_BOUNDS, 0.4)},
        lambda: {"type": "string", **some(_COUNTS[:2], 0.5)},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
        lambda: {"const": number()},
        lambda: {"enum": [number() for _ in range(size(rng, 2000))]},
        lambda: {"type": "array", "items": schema(rng, depth + 1), **some(_COUNTS[2:4], 0.3)},
        lambda: {
            "type": "object",
            "properties": {f"p{n}": schema(rng, depth + 1) for n in range(rng.randrange(4))},
            **some(_COUNTS[4:], 0.1),
            **rng.choice(({}, {"required": ["p0"]}, {"additionalProperties": False})),
        },
        lambda: {
            rng.choice(("anyOf", "allOf", "oneOf")): [
                schema(rng, depth + 1) for _ in range(rng.randrange(4))
            ]
        },
        lambda: {"not": {}},
        lambda: True,
        lambda: {"$ref": "#"},
        lambda: number(),
    )
    return rng.choice(kinds[:5] if depth > 4 else kinds)()


def _large_schema(rng: Random) -> Any:
    number = size(rng, 6000)
    last = rng.choice(({"const": 1}, {"$ref": "#/$defs/d0"}, {"type": "null"}))
    wrap = rng.choice(
        (
            lambda inner: inner,
            lambda inner: {"allOf": [inner]},
            lambda inner: {"anyOf": [inner, {"type": "null"}]},
            lambda inner: {"type": "array", "items": inner},
            lambda inner: {"type": "object", "properties": {"n": inner}, "required": ["n"]},
            lambda inner: {"type": "object", "additionalProperties": inner},
        )
    )
    match rng.randrange(4):
        case 0:
            chain = {f"d{n}": wrap({"$ref": f"#/$defs/d{n + 1}"}) for n in range(number)}
            return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{number}": last}}
        case 1:
            nested: Any = {"type": "integer"}
            for _ in range(min(number, 450)):
                nested = wrap(nested)
            return nested
        case 2:
            return {
                "type": "object",
                "properties": {f"p{n}": {"type": "integer"} for n in range(number)},
            }
    return {"enum": [f"text {n}" for n in range(number)]}


def regex(rng: Random) -> str:
    number = size(rng, 20_000)
    return rng.choice(
        (
            "(" * number + "a" + ")" * number,
            "(a|b)*" * number,
            "a?" * number + "a" * number,
            f"(a{{{number}}}){{{number}}}",
            "[" + "a-z" * number + "]",
            "|".join(map(str, range(number))),
            "[^\\s\\S]",
            "(a*)*" * number,
            "\\p{L}" * number,
            "(?i:é)" * number,
            "a{0}",
            "",
        )
    )


def grammar(rng: Random) -> str:
    number = size(rng, 8000)
    chain = [f"r{n}: r{n + 1}" for n in range(number)]
    gbnf = [f"r{n} ::= r{n + 1}" for n in range(number)]
    inner = json.dumps(schema(rng, 1))
    return rng.choice(
        (
            "\n".join(["start: r0", *chain, f'r{number}: "a"']),
            "\n".join(["root ::= r0", *gbnf, f'r{number} ::= "a"']),
            "\n".join(
                ["start: R0", *[f"R{n}: R{n + 1}" for n in range(number)], f"R{number}: /a/"]
            ),
            "start: start",
            "root ::= root",
            'start: start "a" | start',
            "start: " + "(" * number + '"a"' + ")" * number,
            "root ::= " + "(" * number + '"a"' + ")" * number,
            f'start: "a"{{{number}}}',
            f'root ::= "a"{{{number},}}',
            f"start: %json {inner}",
            "root ::= [\\u00e9\\x41-\\U0001F600]",
            "start: A A\nA: /(ab)+/",
            'start: "a"*' + " start?" * min(number, 500),
            "start: " + " | ".join(f'"{n}"' for n in range(number)),
            "%import common.WS\nstart: WS",
            "start: /[^\\s\\S]/",
        )
    )


def constraints(rng: Random) -> Case:
    """One request with a structured output, in one of the places where they stand."""
    text = "x"
    match rng.randrange(9):
        case 0 | 1:
            form = {"type": "json_schema", "json_schema": {"name": text, "schema": schema(rng)}}
            return Case("a schema", chat(response_format=form), copies=rng.choice((1, 1, 8)))
        case 2:
            tool = {
                "type": "function",
                "function": {"name": "f", "parameters": schema(rng), "strict": True},
            }
            return Case("a tool", chat(tools=[tool] * size(rng, 40), tool_choice="required"))
        case 3:
            body = {
                "input": text,
                "text": {"format": {"type": "json_schema", "name": text, "schema": schema(rng)}},
            }
            return Case(
                "a response's schema", post_json("/v1/responses", {**body, "max_output_tokens": 16})
            )
        case 4:
            return Case("a regular expression", chat(structured_outputs={"regex": regex(rng)}))
        case 5 | 6:
            return Case("a grammar", chat(structured_outputs={"grammar": grammar(rng)}))
        case 7:
            return Case(
                "choices",
                chat(structured_outputs={"choice": [text * n for n in range(1, size(rng, 700))]}),
            )
    structures = [
        {"begin": f"<{n}>", "schema": schema(rng, 1), "end": "</>"} for n in range(size(rng, 500))
    ]
    tag = {"structures": structures, "triggers": ["<"]}
    return Case("a structural tag", chat(structured_outputs={"structural_tag": json.dumps(tag)}))


def templates(rng: Random) -> Case:
    """One chat, or thirty at once, with a template of its own."""
    number = size(rng, 10_000)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    template = rng.choice(
        (
            loop,
            loop,
            "{{ 'a' * 10 ** 10 }}",
            "{{ 2 ** (2 ** 40) }}",
            "{% if 1 %}" * number + "{% endif %}" * number,
            "{{ " + "(" * number + "1" + ")" * number + " }}",
            "{{ messages }}" * number,
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ lipsum(n=1000000) }}",
            "{{ messages[0].content }}",
            "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}"
            "{% endfor %}{{ n.x }}",
        )
    )
    return Case("a chat template", chat(chat_template=template), copies=rng.choice((1, 8, 30)))
