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
_ENTRIES = ("minProperties", "maxProperties")
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
        return draw.choice((_recursive, _mutual, _deep, _by_path))(draw)
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


def _mutual(draw: random.Random) -> dict:
    """Two that contain each other; a reference has keywords beside it."""
    second = {"type": "object", "properties": {"back": {"$ref": "#/$defs/first"}}}
    second |= {"additionalProperties": _schema(draw, 0)}
    first = {"type": "array", "items": {"$ref": "#/$defs/second", "title": "beside it"}}
    return {"$defs": {"first": {**first, "maxItems": 2}, "second": second}, "$ref": "#/$defs/first"}


def _deep(draw: random.Random) -> dict:
    schema = _schema(draw, 0)
    for _ in range(draw.randint(6, 12)):
        if draw.random() < 0.5:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
        else:
            schema = _object(draw, {"in": schema})
    return schema


def _by_path(draw: random.Random) -> dict:
    """A reference into a property, with escapes."""
    schema = _object(draw, {"a/b~c": _schema(draw, 1)})
    schema["properties"]["same"] = {"$ref": "#/properties/a~1b~0c"}
    return schema


def _schema(draw: random.Random, depth: int) -> dict:
    kinds = [_string, _integer, _number, _enum, _const, _plain, _bounds, _several_types]
    if depth > 0:
        kinds += [_array, _tuple, _any_object, _map, _any_of, _one_of, _all_of] * 2
        kinds += [_patterns, _all_of_objects, _one_of_types, _number_of_entries, _no_type]
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


def _bounds(draw: random.Random, _: int) -> dict:
    low = draw.choice((-1e6, -2.75, -0.001, 0, 0.1, 12.5, 1e9))
    high = low + draw.choice((0.25, 1, 33.3, 1e6))
    name = (
        draw.choice(("minimum", "exclusiveMinimum")),
        draw.choice(("maximum", "exclusiveMaximum")),
    )
    schema = {"type": "number", name[0]: low, name[1]: high}
    match draw.randrange(5):
        case 0:
            del schema[name[0]]
        case 1:
            schema = {"type": "string", "minLength": draw.randint(1, 9)}
        case 2:
            schema = {"type": "integer", "multipleOf": 7, "minimum": -100, "maximum": 100}
        case 3:
            step = draw.choice((0.5, 0.25, 2))
            schema = {"type": "number", "multipleOf": step, "minimum": -4, "maximum": 4}
    return schema


def _several_types(draw: random.Random, _: int) -> dict:
    """Keywords hold for values of their own type."""
    types = draw.sample(("string", "integer", "boolean", "null"), 3)
    schema = {"type": types, "minimum": 3, "maximum": 50, "maxLength": 4}
    if draw.random() < 0.5:
        schema["enum"] = ["abc", "abcde", 1, 3, 40, None, False, 2.5]
    return schema


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
    more = draw.choice((False, {"type": "integer"}, True))
    schema = {"type": "array", "prefixItems": items, "items": more, "minItems": len(items) - 1}
    return {**schema, "maxItems": len(items)} if draw.random() < 0.3 else schema


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


def _patterns(draw: random.Random, depth: int) -> dict:
    """Beside properties, some of which have names that match."""
    more = draw.choice((False, True, {"type": "null"}))
    return {
        "type": "object",
        "properties": {"x1": {"type": "integer"}, "other": _schema(draw, 0)},
        "patternProperties": {"^x[0-9]+$": {"type": "integer", "minimum": 3}, "é$": True},
        "required": draw.sample(("x1", "other"), draw.randint(0, 2)),
        "additionalProperties": more,
    }


def _all_of_objects(draw: random.Random, depth: int) -> dict:
    first = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    second = {"properties": {"a": {"minimum": 5}, "b": _schema(draw, depth - 1)}}
    return {"allOf": [first, second], "required": draw.choice(([], ["b"]))}


def _one_of_types(draw: random.Random, depth: int) -> dict:
    parts = [{"type": "string", "maxLength": 3}, _array(draw, depth), {"type": "boolean"}]
    return {"oneOf": draw.sample(parts, 2)}


def _number_of_entries(draw: random.Random, depth: int) -> dict:
    schema = _any_object(draw, depth)
    schema["required"] = [*schema["properties"]]
    return {**schema, "additionalProperties": True, draw.choice(_ENTRIES): 4}


def _no_type(draw: random.Random, depth: int) -> dict:
    """Values of other types are free, so it stands in an object with little room."""
    free = draw.choice(({"minimum": 5}, {"maxLength": 2}, {"required": ["é"]}, {"items": False}))
    properties = {"free": free, "any": True, "none": False, "ключ 🙂": {"const": "🙂\u2028"}}
    return {**_object(draw, {**properties}), "required": ["free"]}


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


_NOT_ENFORCED = {
    "not": {"type": "string"},
    "if": {"const": 1},
    "uniqueItems": True,
    "contains": {"const": 1},
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "$dynamicRef": "#x",
}


def with_unsupported(seed: int) -> tuple[dict, str]:
    """A schema somewhere in which a keyword stands that is not enforced, and the keyword."""
    draw = random.Random(seed)
    name = draw.choice([*_NOT_ENFORCED])
    part = {"type": "object" if "ropert" in name or "depend" in name else "array"}
    part[name] = _NOT_ENFORCED[name]
    for _ in range(draw.randint(0, 3)):
        match draw.randrange(6):
            case 0:
                part = _object(draw, {"a": _schema(draw, 1), "é": part})
            case 1:
                part = {"type": "array", "items": part}
            case 2:
                part = {"anyOf": [_schema(draw, 1), part]}
            case 3:
                part = {"type": "array", "prefixItems": [_schema(draw, 0), part]}
            case 4:
                part = {"type": "object", "additionalProperties": part}
            case 5:
                part = {"type": "object", "patternProperties": {"^p": part}}
    if draw.random() < 0.3:
        return {"$defs": {"part": part}, "$ref": "#/$defs/part"}, name
    return part, name
