"""OpenAI's `response_format` and vLLM's `structured_outputs` and `guided_*` to what the engine
enforces."""

from typing import Any

import msgspec

from frontend.http.api_errors import ApiError, not_supported
from frontend.http.generation.requests import GenerationRequest, ResponseFormat
from frontend.structured_outputs import StructuredOutputsParams

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """None: the text is free.

    Raises:
        ApiError: a type of format that is not known, or several of these fields.
        InvalidInput: see StructuredOutputsParams.
    """
    found: dict[str, StructuredOutputsParams] = {}
    if request.response_format is not None and request.response_format.type != "text":
        found["response_format"] = of_format(request.response_format)
    if request.structured_outputs is not None:
        given = msgspec.structs.asdict(request.structured_outputs)
        set_fields = {name: value for name, value in given.items() if value is not None}
        found["structured_outputs"] = StructuredOutputsParams(**set_fields)
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            options: dict[str, Any] = {kind: value}
            found[name] = StructuredOutputsParams(
                **options, whitespace_pattern=request.guided_whitespace_pattern, field=name
            )
    if len(found) > 1:
        first, second, *_ = found
        raise ApiError(400, f"{first} and {second} are both given; omit one", param=second)
    return next(iter(found.values()), None)


def of_format(asked: ResponseFormat) -> StructuredOutputsParams:
    """
    Raises:
        ApiError, InvalidInput: see `structured_outputs`.
    """
    match asked.type:
        case "json_object" if asked.schema_ is not None:
            return StructuredOutputsParams(json=asked.schema_, field="response_format.schema")
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema" if asked.json_schema is not None:
            return StructuredOutputsParams(
                json=asked.json_schema.schema_ or {}, field="response_format.json_schema.schema"
            )
        case "json_schema":
            param = "response_format.json_schema"
            raise ApiError(400, f"{param} is missing; give a name and a schema", param=param)
        case "structural_tag":
            given = ("structures", "triggers", "format")
            tag = {name: value for name in given if (value := getattr(asked, name)) is not None}
            return StructuredOutputsParams(structural_tag=tag, field="response_format")
        case other:
            raise not_supported(
                "response_format.type",
                other,
                'use "text", "json_object", "json_schema" or "structural_tag"',
            )
