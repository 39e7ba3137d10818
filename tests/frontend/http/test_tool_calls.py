"""Tool calls in recorded outputs of model families, whole and cut at every character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_outputs import OUTPUTS

from frontend.http.tools.calls import ArgumentsDelta, ToolCall
from frontend.http.tools.stream import FORMATS, ToolCallStream, format_of_template

CASES = [(name, case) for name, outputs in OUTPUTS.items() for case in outputs]


def parsed(name, pieces, *, streams_arguments=False):
    """Content, and names and arguments of the calls."""
    stream = ToolCallStream(FORMATS[name]({}), streams_arguments=streams_arguments)
    parts = [part for piece in pieces for part in stream.feed(piece)] + stream.close()
    content, calls = "", []
    for part in parts:
        match part:
            case str():
                content += part
            case ToolCall(call_name, arguments):
                calls.append((call_name, arguments))
            case ArgumentsDelta(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, tuple(calls)


BEGUN = {
    ("hermes", "cut in the arguments"): ("", (("f", '{"a": "x'),)),
    ("hermes", "half of a surrogate pair"): ("}</tool_call>", (("f", '{"a": "\\ud83d"}'),)),
    ("hermes", "no number of JSON"): ("NaN}}</tool_call>", (("f", '{"a": '),)),
    ("hermes", "too deep"): (
        "}</tool_call>",
        (("f", f'{{"a": {"[" * 5000}{"]" * 5000}}}'),),
    ),
    ("llama3_json", "cut"): ("", (("f", '{"a"'),)),
    ("mistral", "a list with a call that is none"): ("}, 5]", (("f", "{}"),)),
    ("mistral", "cut"): ("", (("f", '{"a": [1'),)),
}
"""Where arguments are passed on as they come: calls that do not end as calls do."""


def in_pieces(text):
    """Whole, in characters, and cut once anywhere."""
    yield [text]
    yield list(text)
    for cut in range(1, min(len(text), 400), 1 + len(text) // 1000):
        yield [text[:cut], text[cut:]]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_calls_are_found_and_all_other_text_is_passed_on_whatever_the_pieces(name, case):
    output = OUTPUTS[name][case]
    whole = output.content, output.calls
    begun = BEGUN.get((name, case), whole)
    for pieces in in_pieces(output.text):
        assert parsed(name, pieces) == whole, pieces
        assert parsed(name, pieces, streams_arguments=True) == begun, pieces
    for _, arguments in output.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("name", "head", "tail"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": ', "}"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ', "}]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("openai", "<|channel|>commentary to=functions.f<|message|>", "<|call|>"),
    ],
)
def test_every_character_of_arguments_is_passed_on_at_once(name, head, tail):
    stream = ToolCallStream(FORMATS[name]({}), streams_arguments=True)
    assert [part for char in head for part in stream.feed(char)] in ([], [ToolCall("f", "")])
    arguments = '{"a": "x\\"}", "b": [1, {}]}'
    parts = [stream.feed(char) for char in arguments]
    assert parts[0] in ([ToolCall("f", ""), ArgumentsDelta("{")], [ArgumentsDelta("{")])
    assert parts[1:] == [[ArgumentsDelta(char)] for char in arguments[1:]]
    assert [part for char in tail for part in stream.feed(char)] + stream.close() == []


MARKUP = st.sampled_from([
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", ',
    '"parameters": {}}', '"arguments": {"a": "', '"}}', "[f(a=1)]", "[", "]", "{", "}", '"', "'",
    "\\", "\n", " ", ";", "f(", "a=", "f", "0", "<|message|>", "<|call|>",
    "<|channel|>commentary to=functions.", "<function=f>", "<parameter=a>",
    "</parameter>", "</function>",
    "<|tool_call>call:", '<|"|>', "<tool_call|>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>",
])  # fmt: skip
VARIED = (*OUTPUTS, "qwen3_xml", "glm45", "gemma4", "deepseek_v31", "lfm2", "xlam")
"""One of each way to write names and arguments."""


@pytest.mark.parametrize("name", VARIED)
@given(pieces=st.lists(MARKUP, max_size=14))
def test_no_text_depends_on_its_pieces_and_none_without_calls_is_lost(name, pieces):
    text = "".join(pieces)
    begun = parsed(name, [text], streams_arguments=True)
    assert parsed(name, pieces, streams_arguments=True) == begun
    assert parsed(name, list(text), streams_arguments=True) == begun
    whole = parsed(name, [text])
    assert parsed(name, pieces) == whole
    assert parsed(name, list(text)) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_not_held_back_longer_than_it_may_become_a_call(name):
    stream = ToolCallStream(FORMATS[name]({}))
    assert stream.feed("Hello") == ["Hello"]
    assert stream.feed(" <") in ([" <"], [" "])
    assert "".join(stream.feed("b> x")).endswith("b> x")
    assert stream.close() == []


def test_ids_are_nine_letters_and_digits():
    ids = {ToolCall("f", "{}").id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- if tools %}<tools></tools>\n<tool_call>\n{}</tool_call>{% endif %}", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_xml"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS][' }}", "mistral"),
        ("<|start_header_id|>{{ '{\"name\": name, \"parameters\": dict' }}", "llama3_json"),
        ("<|start_header_id|>[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ 'functions.' + name + '<|channel|>commentary ' }}", "openai"),
        ("<|im_start|>{{ message.content }}", None),
    ],
)  # fmt: skip
def test_the_format_is_known_by_the_markers_in_the_template(template, name):
    assert format_of_template(template) == name


@pytest.mark.parametrize(
    ("name", "start", "piece"),
    [
        ("mistral", "[TOOL_CALLS][", "{},"),
        ("pythonic", "[f(", "[],"),
        ("llama3_json", '{"name": ', "{}"),
        ("hermes", "<tool_call>{", "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "word "),
    ],
)
def test_a_call_that_never_ends_is_not_scanned_again_for_each_piece(
    name, start, piece, monkeypatch
):
    """As a grammar can make a model write: all of the server's streams would stand."""
    number = 4000
    call_format, scanned = FORMATS[name]({}), []
    parse = call_format.parse

    def counted(text, *, at_end):
        scanned.append(len(text))
        return parse(text, at_end=at_end)

    monkeypatch.setattr(call_format, "parse", counted)
    stream = ToolCallStream(call_format)
    parts = stream.feed(start)
    for _ in range(number):
        parts += stream.feed(piece)
    assert sum(scanned) < 400 * number * len(piece)
    parts += stream.close()
    assert "".join(parts) == start + piece * number
