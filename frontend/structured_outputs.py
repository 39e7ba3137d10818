"""vLLM's `StructuredOutputsParams`, and their translation for the engine. A schema travels as
text."""

import json as json_module
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from frontend.errors import InvalidInput
from frontend.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from protocol.errors import InvalidParameter
from protocol.structured_output import ReasoningMarkers, StructuredOutput, StructuredOutputKind

_KINDS = {
    "json": StructuredOutputKind.JSON,
    "regex": StructuredOutputKind.REGEX,
    "choice": StructuredOutputKind.CHOICE,
    "grammar": StructuredOutputKind.GRAMMAR,
    "json_object": StructuredOutputKind.JSON,
    "structural_tag": StructuredOutputKind.STRUCTURAL_TAG,
}


@dataclass
class StructuredOutputsParams:
    """What the text must be: exactly one of a JSON schema (text or object), a regular expression, a
    list of strings, a grammar (Lark or GBNF), any JSON object, or a structural tag.

    `disable_any_whitespace`: none between JSON's tokens; else what `whitespace_pattern` matches.
    `disable_additional_properties`: objects of the schema that do not say so get
    `additionalProperties: false`.
    `reasoning`: the text begins behind such a block, if there is one.
    `field`: what errors call it; default: `structured_outputs`.
    Raises InvalidInput: none of them or several, or one that is not of its kind."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    reasoning: ReasoningFormat | None = None
    field: str | None = None

    def __post_init__(self) -> None:
        self.to_wire()

    def to_wire(self) -> StructuredOutput:
        """Raises InvalidInput: see the class."""
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            called = self.field or "structured_outputs"
            raise InvalidInput(f"{called} has {what}; give exactly one of {', '.join(_KINDS)}")
        try:
            return StructuredOutput(
                kind=_KINDS[given[0]],
                text=self._text(given[0]),
                disable_any_whitespace=self.disable_any_whitespace,
                whitespace_pattern=self.whitespace_pattern,
                reasoning=_markers(self.reasoning),
                field=self.field,
            )
        except InvalidParameter as error:
            raise InvalidInput(str(error)) from None

    def _text(self, name: str) -> str:
        value = getattr(self, name)
        called = self.field or f"structured_outputs.{name}"
        match name:
            case "json_object":
                value = {"type": "object"}
            case "choice":
                if not isinstance(value, list | tuple) or not all(
                    isinstance(choice, str) and choice for choice in value
                ):
                    raise InvalidInput(
                        f"{called} is {value!r:.100}, it must be a list of "
                        "strings that are not empty"
                    )
                value = list(value)
            case "json" if not isinstance(value, str | dict):
                model_json_schema = getattr(value, "model_json_schema", None)
                if model_json_schema is None:
                    raise InvalidInput(f"{called} is {value!r:.100}, it must be a JSON schema")
                value = model_json_schema()
        if isinstance(value, str):
            if name not in ("json", "structural_tag"):
                return value
        elif name in ("regex", "grammar"):
            raise InvalidInput(f"{called} is {value!r:.100}, it must be a string")
        try:
            value = json_module.loads(value) if isinstance(value, str) else value
            if self.disable_additional_properties:
                _close_objects(value)
            return json_module.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"{called} is no JSON: {error}") from None


def _markers(reasoning: ReasoningFormat | None) -> ReasoningMarkers | None:
    if reasoning is None:
        return None
    if not isinstance(reasoning, ReasoningFormat):
        raise InvalidInput(
            f"structured_outputs.reasoning is {reasoning!r:.100}, it must be a ReasoningFormat"
        )
    return ReasoningMarkers(reasoning.start, reasoning.end, is_open=reasoning.always_opens)


def behind_reasoning(
    asked: StructuredOutput, default: ReasoningFormat | None, prompt_end: str
) -> StructuredOutput:
    """The same, where a prompt that ends so has begun or closed the block of reasoning. `default`:
    the format of requests that name none."""
    markers = asked.reasoning or _markers(default)
    if markers is not None:
        end = prompt_end.rstrip()
        if end.endswith(markers.end):
            markers = None
        elif end.endswith(markers.start):
            markers = msgspec.structs.replace(markers, is_open=True)
    return msgspec.structs.replace(asked, reasoning=markers)


def reasoning_of_config(config: Mapping[str, Any] | None) -> ReasoningFormat | None:
    """Of vLLM's `structured_outputs_config`: what may stand before an answer that follows a
    grammar. Raises InvalidInput: a key or value that this engine does not support."""
    config = dict(config or {})
    parser, holds_in_it = config.pop("reasoning_parser", ""), config.pop("enable_in_reasoning", 0)
    if config.pop("backend", "auto") not in ("auto", "guidance"):
        raise InvalidInput("structured_outputs_config.backend must be 'auto' or 'guidance'")
    if unknown := [key for key, value in config.items() if value]:
        raise InvalidInput(
            f"structured_outputs_config.{unknown[0]} is not supported; its keys are backend, "
            "reasoning_parser and enable_in_reasoning; set others in StructuredOutputsParams"
        )
    if parser and parser not in REASONING_FORMATS:
        raise InvalidInput(
            f"structured_outputs_config.reasoning_parser is {parser!r:.100}, it must be one of "
            f"{', '.join(REASONING_FORMATS)}"
        )
    return REASONING_FORMATS[parser] if parser and not holds_in_it else None


def to_wire(structured_outputs: Any, guided_decoding: Any) -> StructuredOutput | None:
    """Of SamplingParams' two fields, either of which may be a dictionary of the fields above.
    Raises InvalidInput: see StructuredOutputsParams; or both are given."""
    if structured_outputs is not None and guided_decoding is not None:
        raise InvalidInput("structured_outputs and guided_decoding are the same; omit the second")
    asked = guided_decoding if structured_outputs is None else structured_outputs
    if isinstance(asked, dict):
        names = {field.name for field in fields(StructuredOutputsParams)}
        if unknown := asked.keys() - names:
            raise InvalidInput(
                f"structured_outputs has no {', '.join(sorted(unknown))}; its fields are "
                f"{', '.join(sorted(names - {'field', 'reasoning'}))}"
            )
        asked = StructuredOutputsParams(**asked)
    if asked is None:
        return None
    if not isinstance(asked, StructuredOutputsParams):
        raise InvalidInput(
            f"structured_outputs is {asked!r:.100}, it must be StructuredOutputsParams"
        )
    return asked.to_wire()


def _close_objects(schema: Any) -> None:
    """Close the schema's objects, in place."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(part.get("properties"), dict) or "patternProperties" in part:
                part.setdefault("additionalProperties", False)
            parts += part.values()
        elif isinstance(part, list):
            parts += part
