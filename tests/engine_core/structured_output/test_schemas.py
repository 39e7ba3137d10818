"""Schemas before they are compiled: numbers as they are written or not at all, what never ends, and
what leads too deep."""

import json

import pytest

from engine_core.structured_output.grammar_error import GrammarError
from engine_core.structured_output.schemas import check_schema, read_json, write_json
from protocol.structured_output import StructuredOutputKind
from tests.engine_core.structured_output.test_compiler import accepts

BIG = 2**53
LEAST, MOST = -(2**63), 2**63 - 1


def check(schema):
    read = read_json(schema if isinstance(schema, str) else json.dumps(schema))
    check_schema(read)
    return write_json(read)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"const": BIG}, [BIG], [BIG + 1, BIG - 1]),
        ({"const": -BIG + 1}, [-BIG + 1], [-BIG]),
        ({"enum": [2**60, -(2**62)]}, [2**60, -(2**62)], [2**60 + 1]),
        ('{"const": 1e3}', [1000], [100]),
        ('{"type": "integer", "const": 1.0}', [1], [10]),
        ('{"const": 0.1}', [0.1], [0.11]),
        ({"type": "integer", "minimum": 0, "maximum": MOST}, [0, MOST], [MOST + 1, -1]),
        ({"type": "integer", "minimum": 2**60, "maximum": MOST}, [2**60], [2**60 - 1]),
        ({"type": "integer", "minimum": -BIG + 1, "maximum": BIG - 1}, [BIG - 1], [BIG, -BIG]),
        ({"type": "integer", "minimum": -(10**17)}, [-(10**17), 10**30], [-(10**17) - 1]),
        ('{"type": "number", "minimum": 0.1, "maximum": 1e17}', [0.1, 10**17], [0.09, 10**17 + 1]),
        ('{"multipleOf": 0.01, "type": "number"}', [0.07], [0.075]),
        ('{"type": "string", "maxLength": 3.0}', ["abc"], ["abcd"]),
        ({"type": "string", "maxLength": MOST}, ["abc"], []),
        ({"type": "array", "items": {"const": 1}, "maxItems": 10**30}, [[1]], [[2]]),
    ],
)
def test_numbers_are_those_of_the_schema(schema, good, bad):
    for values, is_good in ((good, True), (bad, False)):
        for value in values:
            text = json.dumps(value, ensure_ascii=False)
            assert accepts(StructuredOutputKind.JSON, schema, text) == is_good, text


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("const", BIG + 1),
        ("const", -(2**63)),
        ("const", 2**64 - 1),
        ("const", 12345678901234567890123),
        ("enum", [1, {"deep": [BIG + 1]}]),
        ("minimum", BIG + 1),
        ("minimum", LEAST),
        ("maximum", LEAST),
        ("maximum", 10**18),
        ("exclusiveMinimum", BIG),
        ("exclusiveMaximum", -BIG),
        ("multipleOf", 0),
        ("multipleOf", 0.07),
        ("multipleOf", 5_000_000_000),
        ("minLength", -1),
        ("minItems", 2**31),
    ],
)
def test_a_number_that_would_not_be_exact_is_refused_with_keyword_and_property(keyword, value):
    part = {"type": "integer", keyword: value}
    schema = {"properties": {"a": {"items": {"anyOf": [{"type": "null"}, part]}}}}
    with pytest.raises(GrammarError, match=r"^#/properties/a/items/anyOf/1: ") as error:
        check(schema)
    assert keyword in str(error.value)
    check({"properties": {keyword: {"default": value, "examples": [value]}}})


@pytest.mark.parametrize("text", ['{"minimum": -1e300, "type": "number"}', '{"maximum": 1e400}'])
def test_bounds_of_numbers_beyond_what_is_computed_with_are_refused(text):
    with pytest.raises(GrammarError, match=r"imum -?1E\+[34]00 cannot be enforced exactly"):
        check(text)


def test_multiples_that_meet_are_refused_where_their_product_is_not_exact():
    for other, is_refused in ((65539, True), (3, False)):
        schema = {"allOf": [{"multipleOf": 65537}, {"multipleOf": other}]}
        if is_refused:
            with pytest.raises(
                GrammarError, match=r"^#/allOf/1: multipleOf is not enforced beside"
            ):
                check(schema)
        else:
            check(schema)


A, SELF = {"$ref": "#/$defs/a"}, {"$ref": "#"}


def needing(part):
    return {"type": "object", "properties": {"n": part}, "required": ["n"]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({**A, "$defs": {"a": A}}, "#/$defs/a"),
        ({**A, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": A}}, "#/$defs/a"),
        ({"type": "object", "properties": {"x": A}, "$defs": {"a": {"allOf": [A]}}}, "#/$defs/a"),
        ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", **needing({"$ref": "#a"})}}}, "#/$defs/x"),
        ({"$id": "http://x/s", **needing({"$ref": "http://x/s"})}, ""),
        (needing(SELF), ""),
        (needing({"anyOf": [SELF, needing(SELF)]}), ""),
        ({"type": "array", "items": SELF, "minItems": 1}, ""),
        ({"type": "array", "prefixItems": [{}, SELF], "minItems": 2}, ""),
        ({"type": "object", "additionalProperties": SELF, "required": ["a"]}, ""),
        (
            {"items": {"$ref": "#/$defs/a%20b"}, "$defs": {"a b": {"$ref": "#/$defs/a%20b"}}},
            "#/$defs/a%20b",
        ),
    ],
)
def test_what_can_never_end_is_refused_with_its_place(schema, place):
    with pytest.raises(GrammarError, match="no finite text is of it") as error:
        check(schema)
    assert str(error.value).startswith(f"{place}: " if place else "no finite")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"n": SELF}},
        needing({"anyOf": [SELF, {"type": "null"}]}),
        {"type": ["object", "null"], "properties": {"n": SELF}, "required": ["n"]},
        {"properties": {"n": SELF}, "required": ["n"]},
        {"type": "array", "items": SELF},
        {"type": "array", "prefixItems": [{}, SELF], "minItems": 1},
        {"properties": {"$ref": {"type": "string"}, "const": {"minimum": 3}}},
        {"$ref": "#/$defs/missing"},
        {"const": 1, "$defs": {"not needed": {"minimum": LEAST, "not": {}}}},
    ],
)
def test_what_can_end_is_not_refused(schema):
    check(schema)


def test_depth_is_bounded_by_nesting_and_along_references():
    def chain(length, part=lambda reference: reference):
        parts = {f"d{n}": part({"$ref": f"#/$defs/d{n + 1}"}) for n in range(length)}
        return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": {"const": 1}}}

    check(chain(150))
    for part in (
        lambda reference: reference,
        lambda reference: {"anyOf": [reference, {"type": "null"}]},
        lambda reference: {"type": "object", "properties": {"a": reference}},
        lambda reference: {"allOf": [reference]},
    ):
        with pytest.raises(GrammarError, match="lead deeper than 200 into each other"):
            check(chain(3000, part))
    for deep in ("[" * 100_000, '{"a":' * 200 + "1" + "}" * 200):
        with pytest.raises(GrammarError, match=r"nested (too deeply|deeper than 120)"):
            check(deep)


def test_numbers_of_definitions_are_checked_however_they_are_referred_to():
    for name, reference in (("$anchor", "#a"), ("$id", "a"), ("$id", "http://x/a"), ("title", "y")):
        part = {name: reference.removeprefix("#"), "const": BIG + 1}
        with pytest.raises(GrammarError, match=r"^#/\$defs/d: const 9007199254740993"):
            check({"items": {"$ref": reference}, "$defs": {"d": part}})
