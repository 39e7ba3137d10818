"""JSON schemas before they are compiled: numbers that would not be those of the schema, definitions
that nothing finite fulfils, and what leads too deep, each refused with its place."""

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

from engine_core.structured_output.grammar_error import GrammarError
from engine_core.structured_output.regexes import check_regex

FIELD = "x-field"
"""Of a schema that is a part of a grammar: what the user calls it."""

_MAX_NESTING = 120
_MAX_DEPTH = 200
_MAX_PARTS = 50_000
_INT64 = 2**63
_MOST_OPEN = 10**18
"""An integer bound without one on the other side, and a bound of numbers."""
_EXACT = 2**53
_MOST = 2**31 - 1
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
    "not", "if", "then", "else", "contains", "propertyNames",
)  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Parts = dict[str, dict[str, Any]]
"""By path, as "#/properties/a": those that a schema consists of."""


def read_json(text: str) -> Any:
    """With numbers as they are written. Raises GrammarError: no JSON, or nested too deeply."""
    try:
        value = json.loads(text, parse_float=Decimal, parse_constant=_no_number)
    except RecursionError:
        raise GrammarError("it is nested too deeply; make it flatter") from None
    except ValueError as error:
        raise GrammarError(f"it is no JSON: {error}") from None
    level, deep = [value], 0
    while level := [inner for each in level for inner in _inside(each)]:
        deep += 1
        if deep > _MAX_NESTING:
            raise GrammarError(f"it is nested deeper than {_MAX_NESTING} levels; make it flatter")
    return value


def write_json(value: Any) -> str:
    return json.dumps(value, default=_as_number)


def check_schema(schema: Any) -> Parts:
    """Where it counts in a way that means the same, but llguidance does not read (`3.0`), that is
    changed in place. Raises GrammarError, with the place."""
    parts: Parts = {}
    targets: set[str] = set()
    references = _References(schema)
    pending = [("#", schema, 0)]
    while pending:
        path, part, depth = pending.pop()
        if not isinstance(part, dict) or path in parts:
            continue
        if depth > _MAX_DEPTH:
            raise GrammarError(
                f"{_place(path)}definitions and parts lead deeper than {_MAX_DEPTH} into each "
                "other; make it flatter"
            )
        if len(parts) == _MAX_PARTS:
            raise GrammarError(f"it has more than {_MAX_PARTS} parts; give a smaller one")
        parts[path] = part
        try:
            _check_part(part)
        except ValueError as error:
            raise GrammarError(f"{_place(path)}{error}") from None
        inner = [(f"{path}/{name}", each, depth + 1) for name, each in _subschemas(part, _BY_NAME)]
        target = references.target(part)
        if target is not None:
            targets.add(target)
            inner.append((target, _at(schema, target), depth + 1))
        elif "$ref" in part:  # to one of the definitions, or it is refused by llguidance
            inner += [(f"#/{name}", each, 1) for name, each in _subschemas(schema, _DEFINITIONS)]
        pending += reversed(inner)
    _check_multiples(parts)
    for target in sorted(targets - _fulfilled(schema, targets, references)):
        raise GrammarError(
            f"{_place(target)}no finite text is of it: what it requires needs it again, or is "
            "forbidden; let a part be optional"
        )
    return parts


def place_of(parts: Parts, keywords: list[str]) -> str:
    """Of the first part with one of these, as the beginning of a message."""
    return next((_place(path) for path, part in parts.items() if part.keys() & {*keywords}), "")


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class _References:
    """Where they lead: paths within the schema, names of definitions, and its own address."""

    def __init__(self, schema: Any) -> None:
        self._base = ""
        self._names: dict[str, str] = {}
        if isinstance(schema, dict):
            self._base = str(schema.get("$id", "")).removesuffix("#")
            for path, each in _subschemas(schema, _DEFINITIONS):
                if isinstance(each, dict):
                    named = (f"#{each.get('$anchor')}", str(each.get("$id")))
                    self._names |= dict.fromkeys(named, f"#/{path}")

    def target(self, part: dict[str, Any]) -> str | None:
        """None: it has no reference, or one that is not known here."""
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return None
        reference = reference.removeprefix(self._base).rstrip("/") or "#"
        if reference == "#" or reference.startswith("#/"):
            return reference
        return self._names.get(reference)


def _subschemas(part: dict[str, Any], by_name: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for keyword, value in part.items():
        if keyword in by_name and isinstance(value, dict):
            for name, each in value.items():
                yield f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", each
        elif keyword in _LISTS and isinstance(value, list):
            for number, each in enumerate(value):
                yield f"{keyword}/{number}", each
        elif keyword in _SINGLE:
            yield keyword, value


def _at(schema: Any, path: str) -> Any:
    """None: there is none; llguidance says so."""
    for name in path.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict):
            schema = schema.get(name)
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


def _check_part(part: dict[str, Any]) -> None:
    """Raises ValueError."""
    if isinstance(pattern := part.get("pattern"), str):
        check_regex(pattern)
    patterns = part.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) else ():
        check_regex(pattern)
    for keyword in _COUNTS:
        count = part.get(keyword)
        if isinstance(count, Decimal) and count == count.to_integral_value():
            count = part[keyword] = int(count)
        if _is_number(count) and count > _MOST and keyword.startswith("max"):
            part[keyword] = _MOST  # no answer is as long
        elif _is_number(count) and not 0 <= count <= _MOST:
            raise ValueError(f"{keyword} {count} must be from 0 to {_MOST}")
    for keyword in ("const", "enum"):
        pending = [part.get(keyword)]
        while pending:
            value = pending.pop()
            pending += _inside(value)
            if _is_number(value) and not _is_constant_kept(value):
                raise ValueError(_not_exact(keyword, value))
    types = part.get("type")
    types = types if isinstance(types, list) else [types]
    is_integer = "integer" in types and "number" not in types
    is_closed = {name[-7:].lower() for name in _BOUNDS if _is_number(part.get(name))}
    for keyword in _BOUNDS:
        value = part.get(keyword)
        if _is_number(value) and not _is_bound_kept(
            keyword, value, is_integer=is_integer, is_closed=len(is_closed) == 2
        ):
            raise ValueError(_not_exact(keyword, value))


def _not_exact(keyword: str, value: Any) -> str:
    return (
        f"{keyword} {value!s:.60} cannot be enforced exactly; give a number with fewer digits, or "
        "let the type be string, with a pattern"
    )


def _is_number(value: Any) -> TypeGuard[int | Decimal]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _float(value: int | Decimal) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _is_constant_kept(value: int | Decimal) -> bool:
    """llguidance computes in double precision, and writes the shortest digits of what is no
    integer of 64 bits."""
    number = _float(value)
    if isinstance(value, int) and -_INT64 < value < _INT64:
        return int(number) == value
    return Decimal(repr(number)) == value


def _is_bound_kept(
    keyword: str, value: int | Decimal, *, is_integer: bool, is_closed: bool
) -> bool:
    if is_integer and is_closed and keyword == "maximum" and value == _INT64 - 1:
        return True  # it is the limit of llguidance's integers
    number, most = _float(value), _INT64 if is_integer and is_closed else _MOST_OPEN
    if keyword.startswith("exclusive"):
        most = _EXACT
    if not -most < value < most:
        return False
    if is_integer and value == int(value):
        return int(number) == value
    return Decimal(repr(number)) == value


def _check_multiples(parts: Parts) -> None:
    """llguidance has 32 bits for the digits of one, and of the product of those that meet."""
    found: dict[tuple[int, int], str] = {}
    for path, part in parts.items():
        value = part.get("multipleOf")
        if not _is_number(value):
            continue
        number, places = _float(value), 0
        while number % 1 and places < 400:
            number, places = number * 10, places + 1
        if not 0 < number < 2**32 or Decimal(int(number)).scaleb(-places) != value:
            raise GrammarError(f"{_place(path)}{_not_exact('multipleOf', value)}")
        found[int(number), places] = path
    most, product = max((places for _, places in found), default=0), 1
    for (number, places), path in found.items():
        product *= number * 10 ** (most - places)
        if product >= 2**32 and any("allOf" in p or "$ref" in p for p in parts.values()):
            raise GrammarError(
                f"{_place(path)}multipleOf is not enforced beside the others of this schema; "
                "give numbers with fewer digits"
            )


def _fulfilled(schema: Any, targets: set[str], references: _References) -> set[str]:
    """Of the targets of references, those that some finite value is of."""
    known: set[str] = set()
    left = sorted(targets)
    while True:
        num_left = len(left)
        left.reverse()
        for path in [*left]:
            if _is_finite(_at(schema, path), known, references):
                known.add(path)
        left = [path for path in left if path not in known]
        if len(left) == num_left or not left:
            return known


def _is_finite(schema: Any, known: set[str], references: _References) -> bool:
    """Whether some finite value is of it, if some is of the references `known`."""
    if not isinstance(schema, dict):
        return schema is not False
    if (target := references.target(schema)) is not None and target not in known:
        return False

    def is_finite(part: Any) -> bool:
        return _is_finite(part, known, references)

    if not all(is_finite(each) for each in _list(schema.get("allOf"))):
        return False
    for keyword in ("anyOf", "oneOf"):
        cases = _list(schema.get(keyword))
        if cases and not any(is_finite(each) for each in cases):
            return False
    types = schema.get("type")
    if types == "object":
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        other = True if schema.get("patternProperties") else schema.get("additionalProperties")
        names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        return all(is_finite(properties.get(name, other)) for name in names)
    if types == "array" and isinstance(least := schema.get("minItems"), int):
        items = schema.get("items")
        first = _list(schema.get("prefixItems")) or _list(items)
        if len(first) < least and not isinstance(items, list) and not is_finite(items):
            return False
        return all(is_finite(each) for each in first[:least])
    return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _place(path: str) -> str:
    path = path if len(path) <= 200 else f"{path[:100]}...{path[-97:]}"
    return "" if path == "#" else f"{path}: "


def _as_number(value: Decimal) -> float | str:
    """The number as a float; it has been checked to be the same where it counts."""
    number = float(value)
    return number if abs(number) != float("inf") else str(value)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")
