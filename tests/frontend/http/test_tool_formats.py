"""Every format of `formats.toml`: what published chat templates write is read back, whole and cut
at every character, and what a grammar lets a model write are calls that follow their schemas."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from frontend.http.api_errors import ApiError
from frontend.http.harmony import HarmonyStream
from frontend.http.reasoning import ReasoningStream
from frontend.http.settings import ServerSettings
from frontend.http.tools.calls import ArgumentsDelta, ToolCall
from frontend.http.tools.grammar import calls_grammar
from frontend.http.tools.rules import OfferedTool
from frontend.http.tools.stream import FORMATS, ToolCallStream
from frontend.http.tools.syntax import call_syntaxes
from frontend.reasoning_formats import REASONING_FORMATS
from protocol.structured_output import StructuredOutputKind

pytest.importorskip("llguidance")
from tests.engine_core.structured_output.test_compiler import compiled, random_text

ALL_TYPES = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "is_short": {"type": "boolean"},
        "near": {"type": "array", "items": {"type": "string"}},
        "opts": {"type": "object"},
        "note": {"type": ["string", "null"]},
        "text": {"type": "string"},
    },
}
SCHEMAS = {"get_weather": ALL_TYPES, "write_file": ALL_TYPES, "now": {}}
ARGUMENTS = [
    {"city": "Paris"},
    {"city": "São Paulo", "days": 3},
    {"days": -1, "ratio": 0.5},
    {"is_short": True},
    {"is_short": False, "note": None},
    {"near": ["a", "b c"]},
    {"near": []},
    {"opts": {"a": True, "b": {"c": [1, 2, {"d": "x"}]}}},
    {"opts": {}},
    {"text": "line 1\nline 2\n"},
    {"text": "  indented\n\tcode"},
    {"text": "say \"hi\" \\ and 'x'"},
    {"text": "<b>bold</b> & </div>"},
    {"text": '{"a": [1]}'},
    {"text": "5"},
    {"text": "true"},
    {"text": ""},
    {"text": "東京 🎉"},
    {"note": "null-ish", "text": "a=b, c(d)"},
    {
        "city": "x",
        "days": 10**12,
        "ratio": 1e-9,
        "is_short": True,
        "near": ["[", "]"],
        "opts": {"a": False},
        "text": "end",
    },
]
RENDERED = [
    json.loads(line)
    for line in Path(__file__).with_name("rendered_calls.jsonl").read_text().splitlines()
]
"""What the chat templates of llama.cpp's collection write of a call of `get_weather` with each of
`ARGUMENTS`, or of `write_file` with them and then of `now`, in turn. None: no valid call."""

WRITTEN = {
    "openai": '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris"}<|call|>',
    "step3": "<\uff5ctool_calls_begin\uff5c><\uff5ctool_call_begin\uff5c>function"
    "<\uff5ctool_sep\uff5c>"
    '<steptml:invoke name="get_weather"><steptml:parameter name="city">Paris'
    "</steptml:parameter></steptml:invoke><\uff5ctool_call_end\uff5c><\uff5ctool_calls_end\uff5c>",
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>}"
    "<end_function_call>",
    "llama4_pythonic": '<|python_start|>[get_weather(city="Paris")]<|python_end|>',
    "olmo3": '<function_calls>get_weather(city="Paris")</function_calls>',
    "phi4_mini_json": 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": '
    '{"city": "Paris"}}<|action_end|>',
    "longcat": '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
    "</longcat_tool_call>",
    "gigachat3": '<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "dots": '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
    "</parameter>\n</invoke>\n</dots_function_call>",
    "solar_open2": "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris"
    "<|tool_arg:end|>\n<|tool_call:end|>",
    "granite-20b-fc": '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}',
    "xlam": '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "jamba": '<tool_calls>[\n  {"name": "get_weather", "arguments": {"city": "Paris"}}\n]'
    "</tool_calls>",
    "phi4_mini": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    "<|/tool_call|>",
}
"""As the models' cards or vLLM's documents show it."""


def read(name, pieces, *, streams_arguments=False):
    """Text beside calls, and the calls."""
    stream = ToolCallStream(FORMATS[name](SCHEMAS), streams_arguments=streams_arguments)
    content, calls = "", []
    for part in [*(part for piece in pieces for part in stream.feed(piece)), *stream.close()]:
        if isinstance(part, ToolCall):
            calls.append([part.name, part.arguments])
        elif isinstance(part, ArgumentsDelta):
            calls[-1][1] += part.text
        else:
            content += part
    return content, calls


def test_a_parser_against_the_chat_template_is_told_with_both_names():
    def told(template, parser, tool_use=None):
        named = {} if tool_use is None else {"tool_use": tool_use}
        tokenizer = SimpleNamespace(chat_template=template, named_chat_templates=named)
        settings = ServerSettings(tool_call_parser=parser)
        return settings.told_formats(SimpleNamespace(tokenizer=tokenizer))

    assert told("<tool_call> <think></think>", None) == "tools: hermes, reasoning: qwen3"
    assert told("<tool_call>", "qwen") == "tools: qwen, reasoning: none"
    assert told("{{ messages }}", "pythonic") == "tools: pythonic, reasoning: none"
    assert told(None, None) == ""
    found = told("x", "mistral", tool_use="<tool_call>")
    assert "the chat template has calls of hermes" in found and "parser mistral leaves" in found


def test_each_format_is_shown_to_be_read():
    assert {each["format"] for each in RENDERED} | WRITTEN.keys() >= call_syntaxes().keys()
    assert all(len(each["texts"]) == len(ARGUMENTS) for each in RENDERED)


@pytest.mark.parametrize("rendered", RENDERED, ids=[each["template"] for each in RENDERED])
def test_what_a_template_writes_is_read_back(rendered):
    name = rendered["format"]
    for number, text in enumerate(rendered["texts"]):
        if text is None:
            continue
        wanted = [("get_weather", ARGUMENTS[number])]
        if number % 2:
            wanted = [("write_file", ARGUMENTS[number]), ("now", {})]
        whole = read(name, [text])
        content, calls = whole
        assert not content.strip()
        assert [(call, json.loads(arguments)) for call, arguments in calls] == wanted
        assert read(name, list(text)) == whole
        assert read(name, list(text), streams_arguments=True) == whole
        for cut in range(1, len(text)) if number < 2 else ():
            assert read(name, [text[:cut], text[cut:]], streams_arguments=True) == whole


@pytest.mark.parametrize("name", WRITTEN)
def test_what_documents_show_is_read(name):
    text, call = WRITTEN[name], ["get_weather", '{"city": "Paris"}']
    assert read(name, list(text)) == ("", [call])
    assert read(name, list(text), streams_arguments=True) == ("", [call])
    content, calls = read(name, ["I look.\n", *text, "\nDone."])
    assert (content.split(), calls) == (["I", "look.", "Done."], [call])


ONE_CALL = {each["format"]: each["texts"][0] for each in reversed(RENDERED)} | {
    name: text for name, text in WRITTEN.items() if name in call_syntaxes()
}


def words_of(name):
    """Those that a format marks calls with, without quotes."""
    if name == "minimax_m3":
        return ["</tool_call>", "<item>", "</invoke>"]
    syntax = call_syntaxes()[name]
    parts = [*syntax.parameter, syntax.begin, syntax.end, *(p for c in syntax.calls for p in c)]
    words = [word for part in parts if isinstance(part, str) for word in part.split()]
    return [word for word in words if not set("\"'`={") & set(word) and len(word) > 3]


@pytest.mark.parametrize("name", ONE_CALL)
def test_whatever_stands_around_a_call_nothing_is_lost_and_no_marker_is_shown(name):
    one = ONE_CALL[name]
    for text, wanted, number in (
        ("Is 1 < [2] {3}?", "Is 1 < [2] {3}?", 0),
        (f"I look.\n{one}\nand\n{one}\nDone.", "I look.\n\nand\n\nDone.", 2),
        (one.replace("get_weather", "no_tool"), "", 1),
    ):
        for pieces, streams in (([text], False), (text, False), (text, True)):
            content, calls = read(name, pieces, streams_arguments=streams)
            assert content.split() == wanted.split()
            assert len(calls) == number
            assert all(json.loads(arguments) == {"city": "Paris"} for _, arguments in calls)
    for cut in range(len(one)):
        content, calls = read(name, [one[:cut]])
        assert content == one[:cut] or [json.loads(each) for _, each in calls] == [
            {"city": "Paris"}
        ]
    thought = f"<think>Hm.{one}</think>{one}"
    marked = FORMATS[name](SCHEMAS)
    for pieces in ([thought], thought) if marked.is_marked else ():
        stream = ReasoningStream(REASONING_FORMATS["qwen3"], is_open=False, calls=marked)
        found = [*map(stream.feed, pieces), stream.close()]
        reasoning, content = map("".join, zip(*found, strict=True))
        assert reasoning.split() == ["Hm."]
        assert len(read(name, [content])[1]) == 2


@pytest.mark.parametrize("name", ONE_CALL)
def test_markers_in_strings_of_arguments_are_text(name):
    for word in words_of(name):
        text = ONE_CALL[name].replace("Paris", f"a {word} b {word}")
        wanted = {"city": f"a {word} b {word}"}
        for pieces, streams in (([text], False), (text, False), (text, True)):
            content, calls = read(name, pieces, streams_arguments=streams)
            assert (content, [json.loads(each) for _, each in calls]) == ("", [wanted]), word


def test_text_in_tags_is_passed_on_as_it_comes():
    stream = ToolCallStream(FORMATS["qwen3_xml"](SCHEMAS), streams_arguments=True)
    opened = stream.feed("<tool_call>\n<function=write_file>\n<parameter=text>\n")
    assert "".join(getattr(part, "text", "") for part in opened) == '{"text": "'
    assert stream.feed('<a href="x">') == [ArgumentsDelta('<a href=\\"x\\">')]
    assert stream.feed("</parameter> is text") == [ArgumentsDelta("</parameter> is text")]
    assert stream.feed("\n</parameter>\n") == []
    assert stream.feed("</function>\n</tool_call>") == [ArgumentsDelta('"}')]
    assert stream.close() == []


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("{'a': [1, True]}", {"type": "object"}, {"a": [1, True]}),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"$ref": "#/$defs/n"}, 2),
        ("2", {}, 2),
        ("two", {}, "two"),
        ("1e999", {"type": "number"}, sys.float_info.max),
        ("2", {"allOf": [{"$ref": "#/$defs/m"}]}, 2),
        (
            '{"a": "</arg_value></tool_call>"}',
            {"type": "object"},
            {"a": "</arg_value></tool_call>"},
        ),
    ],
)
def test_values_in_tags_are_of_the_types_of_their_schemas(written, schema, value):
    text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    root = {"properties": {"a": schema}, "$defs": {"n": {"type": "integer"}}}
    root["$defs"]["m"] = {"$ref": "#/$defs/n"}
    stream = ToolCallStream(FORMATS["glm45"]({"f": root}))
    (call,) = [*stream.feed(text), *stream.close()]
    assert json.loads(call.arguments) == {"a": value}


STRICT = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 40},
        "is_short": {"type": ["boolean", "null"]},
        "kind": {"enum": ["a b", "é"]},
        "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
        "near": {"type": "array", "items": {"enum": ["é", "x", 1.5]}, "maxItems": 2},
        "opts": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
    "required": ["days", "city"],
    "additionalProperties": False,
}
TOOLS = [
    OfferedTool("get_weather", STRICT, is_strict=True),
    OfferedTool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]


class NoAddedTokens:
    backend = property(lambda self: self)

    def get_added_tokens_decoder(self):
        return {}


def written(name, tools, seed, has_one_call=False):
    """A text of the grammar; None: it had no end."""
    lark = calls_grammar(
        name,
        tools,
        NoAddedTokens(),
        must_call=True,
        has_one_call=has_one_call,
        template="",
        answer=None,
    )
    matcher = compiled(StructuredOutputKind.GRAMMAR, lark)
    syntax = call_syntaxes().get(name)
    parts = (*syntax.calls[0], *syntax.parameter, syntax.quote, syntax.end) if syntax else ()
    words = ['"', "}", *(each for each in parts if isinstance(each, str) and each)]
    if name == "minimax_m3":
        keys = [key for tool in tools for key in tool.parameters.get("properties", ())]
        words += [f"]<]minimax[>[</{key}>" for key in (*keys, "c")]
    return random_text(matcher, seed, most=900, words=words)


def called(name, text, tools):
    """Calls in a text that is nothing else, checked by their schemas."""
    schemas = {tool.name: tool.parameters for tool in tools}
    if name == "openai":
        messages = HarmonyStream(schemas)
        text = messages.feed(text)[1] + messages.close()[1]
        text = text[text.index("<|channel|>") :]  # preambles are text
    stream = ToolCallStream(FORMATS[name](schemas))
    calls = [*stream.feed(text), *stream.close()]
    assert calls and all(isinstance(call, ToolCall) for call in calls), text
    for call in calls:
        validator = jsonschema.Draft202012Validator(
            schemas[call.name], format_checker=jsonschema.FormatChecker()
        )
        validator.validate(json.loads(call.arguments))
    return calls


@pytest.mark.parametrize("name", ["llama3_json", "minimax_m3", *call_syntaxes()])
def test_forced_calls_follow_their_schemas(name):
    numbers = set()
    for has_one_call in (True, False):
        for seed in range(4):
            if (text := written(name, TOOLS, seed, has_one_call)) is not None:
                calls = called(name, text, TOOLS)
                assert len(calls) == 1 or not has_one_call
                numbers.add(len(calls))
    assert numbers


NASTY = {
    "parts": {
        "type": "object",
        "properties": {
            "both": {"allOf": [{"$ref": "#/$defs/small"}, {"minimum": 3}]},
            "either": {
                "anyOf": [
                    {"type": "string", "pattern": "^[a-c]{2}$|x/\\$$", "maxLength": 3},
                    {"type": "integer"},
                ]
            },
            "again": {"$ref": "#/properties/both"},
            "maybe": {"oneOf": [{"enum": ['"é"', "a\\b"]}, {"type": "null"}]},
            "tree": {"$ref": "#/$defs/tree"},
            "counts": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "mixed": {"enum": ["a", 1, None, True]},
            "when": {"type": "string", "format": "date"},
        },
        "required": ["both", "either", "again", "maybe", "mixed", "when"],
        "additionalProperties": False,
        "$defs": {
            "small": {"type": "integer", "maximum": 9},
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "boolean"},
                    "next": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["leaf"],
                "additionalProperties": False,
            },
        },
    },
    "root": {
        "$ref": "#/$defs/it",
        "$defs": {
            "it": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "number"}},
                "anyOf": [{"required": ["a", "c"]}, {"required": ["b"]}],
            }
        },
    },
    "bare": {"type": "object", "additionalProperties": {"type": "integer"}},
}


@pytest.mark.parametrize("name", ["hermes", "lfm2", "qwen3_xml", "gemma4", "minimax_m3"])
@pytest.mark.parametrize("schema", NASTY)
def test_whatever_a_schema_is_made_of_forced_calls_follow_it(name, schema):
    tools = [OfferedTool("do_it", NASTY[schema])]
    texts = [written(name, tools, seed, has_one_call=True) for seed in range(4)]
    for text in filter(None, texts):
        assert len(called(name, text, tools)) == 1
    assert any(texts)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"patternProperties": {"a": {}}}, "patternProperties is not enforced"),
        ({"minProperties": 1}, "minProperties is not enforced"),
        ({"if": {}}, "if is not enforced"),
        ({"required": ["b"], "additionalProperties": False}, "required 'b', which nothing is of"),
        ({"allOf": [{"properties": {"a": {}}}]}, "properties that stands in allOf"),
        ({"oneOf": [{"type": "object"}, {"required": ["a"]}]}, "two cases could hold at once"),
        ({"$ref": "#/$defs/none"}, "$ref '#/$defs/none', which is not in the schema"),
        ({"properties": {"a": {"type": "string", "format": "int64"}}}, "format 'int64'"),
        ({"properties": {"a": {"type": "string", "pattern": "a^b"}}}, "pattern with ^"),
        ({"properties": {'a">{': {}}}, "a property cannot be named"),
    ],
)
def test_what_no_grammar_of_a_format_can_hold_is_refused_by_name(part, words):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **part}
    tool = OfferedTool("f", schema, field="tools[3].function.parameters")
    for name in ("qwen3_xml", "gemma4"):
        with pytest.raises(ApiError) as error:
            written(name, [tool], 0)
        assert error.value.param == "tools[3].function.parameters"
        assert words in error.value.message


def test_a_name_is_passed_on_when_its_end_is_there():
    stream = ToolCallStream(FORMATS["glm47"]({}), streams_arguments=True)
    parts = [part for char in "<tool_call>do-it.now</tool_call>" for part in stream.feed(char)]
    assert parts[0] == ToolCall("do-it.now", "")
