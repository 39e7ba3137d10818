"""What a JSON schema lets through, for calls whose arguments are not written as JSON."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from frontend.http.api_errors import ApiError

Schema = dict[str, Any]
_NOTES = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema",
    "$comment", "$id", "$anchor", "$defs", "definitions", "x-field",
})  # fmt: skip
_KINDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""Keywords that say something of values of one type alone."""
_FREE = frozenset({
    "not", "if", "then", "else", "prefixItems", "uniqueItems", "contains", "additionalItems",
    "unevaluatedItems", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef",
})  # fmt: skip
_MOST_DEPTH, _MOST_CASES = 16, 64


class NotEnforced(ValueError):
    """A grammar cannot hold it; the text names the keyword."""


def not_enforced(field: str, error: NotEnforced) -> ApiError:
    why = f"{field}: {error} where this model does not write JSON; change it, or use tool_choice "
    return ApiError(400, f"{why}auto without strict", param=field)


def referred(ref: str, root: Mapping[str, Any]) -> Any:
    """What a schema's `$ref` names within the whole schema; None: nothing there."""
    target: Any = root if ref.startswith("#") else None
    for step in filter(None, ref.removeprefix("#").split("/")):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """JSON's types that a schema lets through, as far as it says; empty: it does not."""
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        return set()
    if isinstance(named := schema.get("type"), str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return {"string"} if all(isinstance(each, str) for each in values) else {"enum"}
    if isinstance(ref := schema.get("$ref"), str):
        return types_of(referred(ref, root), root, depth + 1)
    for each in schema.get("allOf") or ():
        if found := types_of(each, root, depth + 1):
            return found
    either = [each for key in ("anyOf", "oneOf") for each in schema.get(key) or ()]
    inferred = {kind for kind, keywords in _KINDS.items() if keywords & schema.keys()}
    return inferred.union(*(types_of(each, root, depth + 1) for each in either))


def property_of(schema: Any, name: str | None, root: Mapping[str, Any], depth: int = 0) -> Any:
    """The first schema of a property that an object's has, without a name of the items of an
    array; None: it has none."""
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        return None
    if isinstance(ref := schema.get("$ref"), str):
        return property_of(referred(ref, root), name, root, depth + 1)
    properties = schema.get("properties") if name is not None else {None: schema.get("items")}
    if isinstance(properties, dict) and properties.get(name) is not None:
        return properties[name]
    parts = [each for key in ("allOf", "anyOf", "oneOf") for each in schema.get(key) or ()]
    found = (property_of(each, name, root, depth + 1) for each in parts)
    others = schema.get("additionalProperties") or None
    return next((each for each in found if each is not None), others)


def cases_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Schema]:
    """Schemas one of which holds, without `$ref`, `allOf`, `anyOf` and `oneOf` but within.
    Raises NotEnforced."""
    if not isinstance(schema, dict):
        return [] if schema is False else [{}]
    if depth > _MOST_DEPTH:
        raise NotEnforced(
            f"$ref, allOf, anyOf and oneOf deeper than {_MOST_DEPTH} are not enforced"
        )
    own = {key: value for key, value in schema.items() if key not in _NOTES}
    if wrong := sorted(_FREE & own.keys()):
        raise NotEnforced(f"{', '.join(wrong)} is not enforced")
    parts = [*own.pop("allOf", ())]
    if "$ref" in own:
        ref = own.pop("$ref")
        parts.append(referred(ref, root) if isinstance(ref, str) else None)
        if parts[-1] is None:
            raise NotEnforced(f"$ref {ref!r:.100}, which is not in the schema, is not enforced")
    choices = [cases_of(part, root, depth + 1) for part in parts]
    for keyword in [key for key in ("anyOf", "oneOf") if key in own]:
        cases = [cases_of(each, root, depth + 1) for each in own.pop(keyword)]
        if keyword == "oneOf" and any(itertools.starmap(_meet, itertools.combinations(cases, 2))):
            raise NotEnforced("oneOf, of which two cases could hold at once, is not enforced")
        choices.append([case for each in cases for case in each])
    found = list(itertools.islice(itertools.product(*choices), _MOST_CASES + 1))
    if len(found) > _MOST_CASES:
        raise NotEnforced(f"anyOf and oneOf with more than {_MOST_CASES} cases are not enforced")
    return [_merged([own, *more]) for more in found]


def _merged(parts: list[Schema]) -> Schema:
    found: Schema = {}
    for part in parts:
        for key, value in part.items():
            old: Any = found.get(key, value)
            if old == value:
                found[key] = value
            elif key == "required":
                found[key] = [*dict.fromkeys([*old, *value])]
            elif key == "properties" and not old.keys() & value.keys():
                found[key] = {**old, **value}
            elif key == "type" and (both := _both(old, value)):
                found[key] = both
            else:
                raise NotEnforced(f"{key} that stands in allOf, anyOf or beside $ref, too, is not")
    if not found.get("additionalProperties", True) and any(
        found.get("properties", {}).keys() - part.get("properties", {}).keys()
        for part in parts
        if "additionalProperties" in part
    ):
        raise NotEnforced("additionalProperties beside properties of another part is not enforced")
    return found


def _both(*types: Any) -> list[str]:
    first, second = ({each} if isinstance(each, str) else {*each} for each in types)
    whole = {"integer"} if {"integer", "number"} <= first | second else set()
    return sorted((first & second) | (whole & (first | second)))


def constants_of(case: Schema) -> list[Any] | None:
    """The values of `enum` or `const`; None: the case has neither."""
    return case.get("enum", [case["const"]] if "const" in case else None)


def _meet(first: list[Schema], second: list[Schema]) -> bool:
    """Whether a value may be of a case of both, as far as their types and constants tell."""
    for cases in itertools.product(first, second):
        one, other = map(constants_of, cases)
        if one is not None and other is not None:
            if any(each in other for each in one):
                return True
            continue
        types = [
            {each.replace("integer", "number") for each in types_of(case, {})} for case in cases
        ]
        if not all(types) or types[0] & types[1] or "enum" in types[0] | types[1]:
            return True
    return False


def objects_of(
    schema: Any, root: Mapping[str, Any]
) -> Iterator[tuple[list[tuple[str, Any, bool]], Any]]:
    """Of each case that is an object: names and schemas of its properties, and whether they may be
    missing; and the schema of all others. Raises NotEnforced."""
    for case in cases_of(schema, root):
        if "object" not in (types_of(case, root) or {"object"}):
            continue
        if "enum" in case or "const" in case:
            raise NotEnforced("enum or const of objects is not enforced")
        others = case.get("additionalProperties", True)
        properties: Schema = case.get("properties") or {}
        required = case.get("required") or ()
        properties = {**properties, **{name: others for name in required if name not in properties}}
        if wrong := [name for name in required if properties[name] is False]:
            raise NotEnforced(f"required {wrong[0]!r:.100}, which nothing is of, is not enforced")
        for name, each in properties.items():  # the reader of values goes by the first of a name
            if types_of(each, root) != types_of(property_of(schema, name, root), root):
                raise NotEnforced(f"anyOf with {name!r:.100} of several types is not enforced")
        yield (
            [
                (name, each, name not in required)
                for name, each in properties.items()
                if each is not False
            ],
            others,
        )


def embedded(schema: Any, root: Mapping[str, Any]) -> Schema:
    """A part of a schema as a schema of its own: what it refers to goes along."""
    if not isinstance(schema, dict):
        return {}
    has_refs = False

    def moved(value: Any) -> Any:
        nonlocal has_refs
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        ref = value.get("$ref")
        found = {key: moved(each) for key, each in value.items()}
        if isinstance(ref, str) and ref.startswith("#"):
            has_refs = True
            found["$ref"] = f"#/$defs/whole{ref.removeprefix('#')}"
        return found

    part = moved(schema)
    return {**part, "$defs": {"whole": moved(root)}} if has_refs else part


_REGEX_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_ESCAPE = re.compile(r"\\.|[/\n]", re.DOTALL)
_CLASSES = {r"\d": "0-9", r"\w": "0-9A-Za-z_", r"\s": r" \t\n\r\f\v"}
_PLAIN = {"/": r"\/", "\n": r"\n"}


def whole_regex(pattern: str) -> str:
    """For a terminal of a grammar, which a whole text matches: of a pattern of a schema, which
    matches anywhere. Raises NotEnforced."""
    cases: list[list[str]] = [[]]
    depth = 0
    for match in _REGEX_PART.finditer(pattern):
        part = match[0]
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            cases.append([])
            continue
        if part in _CLASSES:
            part = f"[{_CLASSES[part]}]"
        elif part[0] == "[" and part[1:2] != "^":
            part = re.sub(r"\\.", lambda each: _CLASSES.get(each[0], each[0]), part)
        cases[-1].append(part)
    whole = []
    for case in cases:
        begin, end = case[:1] == ["^"], case[-1:] == ["$"]
        core = case[begin : len(case) - end]
        if {"^", "$", r"\b", r"\B"} & {*core}:
            raise NotEnforced("pattern with ^, $ or \\b within is not enforced")
        free = r"(.|\n)*"
        whole.append("".join(["" if begin else free, "(", *core, ")", "" if end else free]))
    return _ESCAPE.sub(lambda each: _PLAIN.get(each[0], each[0]), f"({'|'.join(whole)})")
