"""A refused schema is named as the request names it: the tool among many, the property, the
keyword."""

import pytest

from engine_core.structured_output.grammar_error import GrammarError
from frontend.errors import RequestRejected
from frontend.http.api_errors import ApiError, api_error
from frontend.http.generation.requests import JsonSchemaFormat, ResponseFormat
from frontend.http.generation.structured_outputs import of_format
from frontend.http.tools.grammar import calls_grammar
from frontend.http.tools.rules import OfferedTool
from frontend.structured_outputs import StructuredOutputsParams
from protocol.errors import ErrorCode
from tests.engine_core.structured_output.vocabularies import compiler

FREE = {"type": "object", "properties": {"a": {"type": "string"}}}


def refusal(params):
    with pytest.raises(GrammarError) as error:
        compiler().compile(params.to_wire())
    return str(error.value)


def with_part(part):
    return {"type": "object", "properties": {"q": {"anyOf": [{"type": "null"}, part]}}}


@pytest.mark.parametrize("form", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "array", "uniqueItems": True}, 'the keywords ["uniqueItems"] are not enforced'),
        ({"const": 2**53 + 1}, "const 9007199254740993 cannot be enforced exactly"),
        ({"type": "string", "format": "int64"}, "Unknown format: int64"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ],
)
def test_of_thirty_tools_the_one_with_the_keyword_is_named(form, part, words):
    tools = [
        OfferedTool(
            f"f{number}",
            with_part(part) if number == 17 else FREE,
            is_strict=True,
            field=f"tools[{number}].function.parameters",
        )
        for number in range(30)
    ]
    lark = calls_grammar(
        form, tools, None, must_call=True, has_one_call=False, template="", answer=None
    )
    why = refusal(StructuredOutputsParams(grammar=lark, field="tools"))
    assert why.startswith("tools[17].function.parameters")
    assert words in why
    if "look" not in words:
        assert (
            "#/properties/q/anyOf/1: " if form == "llama3_json" else "q cannot be used: #/"
        ) in why
    assert "structured_outputs" not in why
    assert "x-field" not in why


def test_the_answer_beside_tools_is_named_as_it_was_sent():
    lark = calls_grammar(
        "llama3_json",
        [OfferedTool("f", FREE, field="tools[0].function.parameters")],
        None,
        must_call=False,
        has_one_call=False,
        template="",
        answer={"not": {}},
        answer_field="response_format.json_schema.schema",
    )
    why = refusal(StructuredOutputsParams(grammar=lark, field="tools"))
    assert why.startswith('response_format.json_schema.schema cannot be used: the keywords ["not"]')


def test_a_response_format_is_named_and_so_is_param():
    schema = JsonSchemaFormat(name="x", schema_=with_part({"not": {}}))
    why = refusal(of_format(ResponseFormat(type="json_schema", json_schema=schema)))
    assert why.startswith(
        "response_format.json_schema.schema cannot be used: #/properties/q/anyOf/1"
    )
    error = api_error(RequestRejected(why, request_id="r", code=ErrorCode.INVALID_REQUEST))
    assert (error.status, error.param) == (400, "response_format.json_schema.schema")
    assert refusal(StructuredOutputsParams(regex="((")).startswith(
        "structured_outputs.regex cannot"
    )
    named = StructuredOutputsParams(regex="((", field="guided_regex")
    assert refusal(named).startswith("guided_regex cannot be used")


def test_a_schema_that_is_nested_too_deeply_is_named():
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    tool = OfferedTool("f", deep, field="tools[3].function.parameters")
    options = {"must_call": True, "has_one_call": False, "template": "", "answer": None}
    with pytest.raises(ApiError, match=r"^tools\[3\]\.function\.parameters is nested too") as error:
        calls_grammar("llama3_json", [tool], None, **options)
    assert error.value.param == "tools[3].function.parameters"
    while deep:  # one by one: to free it at once recurses, too
        deep = deep["items"]
