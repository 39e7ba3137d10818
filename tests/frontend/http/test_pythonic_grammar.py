"""Forced and strict tools of models that write calls as Python: what the grammar lets a model write
is read as calls whose arguments follow their schemas."""

import json

import jsonschema
import pytest

from frontend.http.api_errors import ApiError
from frontend.http.tools.calls import ToolCall
from frontend.http.tools.grammar import calls_grammar
from frontend.http.tools.rules import OfferedTool
from frontend.http.tools.stream import FORMATS, ToolCallStream
from protocol.structured_output import StructuredOutputKind

pytest.importorskip("llguidance")
from tests.engine_core.structured_output.test_compiler import (
    accepts,
    compiled,
    random_text,
)

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 40},
        "is_short": {"type": ["boolean", "null"]},
        "near": {"$ref": "#/$defs/place"},
    },
    "required": ["days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"enum": ["é", 'a "b"', 1.5]}, "maxItems": 2}},
}
TOOLS = [
    OfferedTool("geo.weather", WEATHER, is_strict=True),
    OfferedTool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]


def grammar(tools=TOOLS, **options):
    options = {"must_call": True, "has_one_call": False, "answer": None, **options}
    return calls_grammar("pythonic", tools, None, template="", **options)


def written(lark, seed):
    return random_text(compiled(StructuredOutputKind.GRAMMAR, lark), seed)


def read(text):
    stream = ToolCallStream(FORMATS["pythonic"]({}), streams_arguments=False)
    return [*stream.feed(text), *stream.close()]


@pytest.mark.parametrize("has_one_call", [False, True])
def test_forced_calls_follow_their_schemas(has_one_call):
    lark, schemas = (
        grammar(has_one_call=has_one_call),
        {tool.name: tool.parameters for tool in TOOLS},
    )
    numbers = set()
    for seed in range(40):
        if (text := written(lark, seed)) is None:
            continue
        calls = read(text)
        assert calls and all(isinstance(call, ToolCall) for call in calls), text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name] or {})
        numbers.add(len(calls))
    assert numbers == {1} if has_one_call else max(numbers) > 1


def test_a_strict_tool_that_is_not_forced_leaves_other_answers_free():
    lark = grammar([TOOLS[0], OfferedTool("anything", None)], must_call=False)
    for text, is_good in (
        ("", True),
        ("It is [cold].", True),
        ('[geo.weather(city="Rome", days=2)]', True),
        ('[geo.weather(days=2, near=["é"]), anything(x=1, y=["z"]), anything()]', True),
        ('[geo.weather(city="Rome")]', False),
        ("[geo.weather(days=2, sky=1)]", False),
        ("[cold]", False),
    ):
        assert accepts(StructuredOutputKind.GRAMMAR, lark, text) == is_good, text


@pytest.mark.parametrize("name", ["with space", "class", "geo.1"])
def test_names_that_python_does_not_have_are_refused(name):
    parameters = {"type": "object", "properties": {name: {}}}
    for tool in (OfferedTool(name, None), OfferedTool("f", parameters)):
        with pytest.raises(ApiError, match="is no name in Python"):
            grammar([tool])
