"""JSON schemas of all kinds, each made of a seed: what they allow, some value fulfils."""

import random
import string

_PATTERNS = (
    "^[a-z]{2,4}$", r"^\d{3}-\d{2}$", "^(red|green|blue)$", "^[A-Z][a-z]*$",
    r"^\w+@\w+\.(org|com)$",
    "ab+c", r"^[^\"\\]{1,5}$", r"^(?:x|yz){1,3}$", "^$",
)  # fmt: skip
_FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
_CONSTANTS = (
    0,
    -3,
    1.5,
    True,
    False,
    None,
    "",
    "é ü",
    'a "quoted" \\ text',
    "🙂\n\t",
    [],
    {},
    [1, [2]],
    {"a": {"b": [None]}},
)


def make_schema(seed: int) -> dict:
    """Deterministic; of about one in five the root is recursive."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        return _recursive(draw)
    schema = _schema(draw, depth=draw.randint(1, 3))
    if draw.random() < 0.3:
        schema = {"$defs": {"part": schema}, "$ref": "#/$defs/part"}
        if draw.random() < 0.5:
            schema = {"$defs": schema["$defs"], **_object(draw, {"a": {"$ref": "#/$defs/part"}})}
    return schema


def _recursive(draw: random.Random) -> dict:
    node = _object(draw, {"value": _schema(draw, 0)})
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": draw.randint(1, 2)}
    node["properties"]["children"] = children
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _schema(draw: random.Random, depth: int) -> dict:
    kinds = [_string, _integer, _number, _enum, _const, _plain]
    if depth > 0:
        kinds += [_array, _tuple, _any_object, _map, _any_of, _one_of, _all_of] * 2
    return draw.choice(kinds)(draw, depth) if depth else draw.choice(kinds)(draw, 0)


def _string(draw: random.Random, _: int) -> dict:
    match draw.randrange(5):
        case 0:
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": draw.choice(_FORMATS)}
        case 2:
            least = draw.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 5)}
        case 3:
            return {"type": "string", "maxLength": draw.randint(0, 8)}
        case _:
            return {"type": "string", "pattern": "^[a-z é]*$", "minLength": 2, "maxLength": 6}


def _integer(draw: random.Random, _: int) -> dict:
    low = draw.randint(-50, 50)
    schema = {"type": "integer", "minimum": low, "maximum": low + draw.randint(10, 300)}
    match draw.randrange(4):
        case 0:
            schema["multipleOf"] = draw.choice((2, 3, 5))
        case 1:
            schema = {"type": "integer", "exclusiveMinimum": low}
        case 2:
            schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9}
    return schema


def _number(draw: random.Random, _: int) -> dict:
    low = draw.choice((-10, -0.5, 0, 0.25, 3))
    match draw.randrange(4):
        case 0:
            return {"type": "number", "minimum": low, "maximum": low + draw.choice((0.5, 7, 100))}
        case 1:
            return {"type": "number", "exclusiveMinimum": low}
        case 2:
            return {"type": "number", "multipleOf": draw.choice((0.5, 0.25, 4))}
        case _:
            return {"type": "number"}


def _enum(draw: random.Random, _: int) -> dict:
    return {"enum": draw.sample(_CONSTANTS, draw.randint(1, 4))}


def _const(draw: random.Random, _: int) -> dict:
    return {"const": draw.choice(_CONSTANTS)}


def _plain(draw: random.Random, _: int) -> dict:
    kinds = ("string", "integer", "number", "boolean", "null")
    if draw.random() < 0.3:
        return {"type": draw.sample(kinds, 2)}
    return {"type": draw.choice(kinds), "title": "a title", "description": "of no effect"}


def _array(draw: random.Random, depth: int) -> dict:
    schema = {"type": "array", "items": _schema(draw, depth - 1)}
    least = draw.randint(0, 2)
    if draw.random() < 0.7:
        schema |= {"minItems": least, "maxItems": least + draw.randint(0, 2)}
    return schema


def _tuple(draw: random.Random, depth: int) -> dict:
    items = [_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    more = draw.choice((False, {"type": "integer"}))
    return {"type": "array", "prefixItems": items, "items": more, "minItems": len(items) - 1}


def _any_object(draw: random.Random, depth: int) -> dict:
    names = draw.sample(("a", "bb", "ccc", "ключ", "with space", 'q"uote', "$ref", "0"), 3)
    return _object(draw, {name: _schema(draw, depth - 1) for name in names})


def _object(draw: random.Random, properties: dict) -> dict:
    required = [name for name in properties if draw.random() < 0.6]
    more = draw.choice((False, False, {"type": "boolean"}, True))
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": more,
    }


def _map(draw: random.Random, depth: int) -> dict:
    letter = draw.choice(string.ascii_lowercase)
    match draw.randrange(3):
        case 0:
            return {"type": "object", "additionalProperties": _schema(draw, depth - 1)}
        case 1:
            return {
                "type": "object",
                "patternProperties": {f"^{letter}[0-9]$": _schema(draw, depth - 1)},
                "additionalProperties": False,
            }
        case _:
            most = draw.randint(1, 3)
            return {"type": "object", "minProperties": 1, "maxProperties": most}


def _any_of(draw: random.Random, depth: int) -> dict:
    return {"anyOf": [_schema(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def _one_of(draw: random.Random, depth: int) -> dict:
    kinds = draw.sample(("cat", "dog", "bird"), 2)
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "of": _schema(draw, depth - 1)},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for kind in kinds
        ]
    }


def _all_of(draw: random.Random, _: int) -> dict:
    low = draw.randint(0, 9)
    return {
        "allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 20}, {"multipleOf": 2}]
    }
