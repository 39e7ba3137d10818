"""Tools and reasoning in chat completions before a scripted engine."""

import json
import re
import time

import pytest
from fake_model import ids_of
from http_server import TEMPLATE, events_of
from tool_outputs import OUTPUTS

HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
BROKEN_CALL = {"function": {"name": "f", "arguments": "{"}}
MARKERS = {
    "hermes": "<tool_call>",
    "llama3_json": '<|start_header_id|>"parameters"',
    "mistral": "[TOOL_CALLS]",
    "pythonic": "func_name1(",
}
THINKS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)


def chat(http, **fields):
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 400, **fields}
    return http.post("/v1/chat/completions", json=body)


def joined(events):
    """A stream's message, as OpenAI's clients join it."""
    content, reasoning, calls, reasons = "", "", {}, []
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content", "")
            reasoning += delta.get("reasoning", "")
            reasons.append(choice["finish_reason"])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["type"] == "function"
                    assert call["index"] == len(calls)
                    calls[call["index"]] = [call["function"]["name"], ""]
                calls[call["index"]][1] += call["function"]["arguments"]
    assert set(reasons[:-1]) <= {None}
    return content, reasoning, [tuple(call) for call in calls.values()], reasons[-1]


def answered(http, *, stream, **fields):
    """As `joined`, whole or as a stream."""
    response = chat(http, stream=stream, **fields)
    if stream:
        return joined(events_of(response))
    (choice,) = response.json()["choices"]
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    content, reasoning = message["content"], message.get("reasoning", "")
    assert (content is None) == (not content and bool(calls or reasoning))
    return content or "", reasoning, calls, choice["finish_reason"]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("hermes", "text, then two calls"),
        ("hermes", "no call"),
        ("hermes", "a missing brace"),
        ("hermes", "text behind a call"),
        ("llama3_json", "several calls"),
        ("mistral", "with an id"),
        ("pythonic", "several"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_as_such_and_text_beside_them_as_content(serve_text, name, case, stream):
    output = OUTPUTS[name][case]
    http = serve_text(output.text, TEMPLATE.replace("MARKERS", MARKERS[name]))
    content, _, calls, reason = answered(http, stream=stream, tools=TOOLS)
    assert (content, tuple(calls)) == (output.content, output.calls)
    assert reason == ("tool_calls" if output.calls else "stop")


def test_a_cut_call_is_text_of_a_whole_answer_and_a_call_without_its_end_in_a_stream(serve_text):
    text = OUTPUTS["hermes"]["cut in the arguments"].text
    http = serve_text(text, TEMPLATE.replace("MARKERS", "<tool_call>"))
    assert chat(http, tools=TOOLS).json()["choices"][0]["message"]["content"] == text
    content, _, calls, _ = joined(events_of(chat(http, tools=TOOLS, stream=True)))
    assert (content, calls) == ("", [("f", '{"a": "x')])
    body = {"input": "Hi", "tools": [{"type": "function", "name": "f"}], "stream": True}
    response = http.post("/v1/responses", json=body).text
    assert '"arguments":"{\\"a\\": \\"x"' in response.split("\n\n")[-2]
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"model": "fake", "messages": HELLO, "max_tokens": 400, "tools": tools, "stream": True}
    events = re.findall(r"data: (.+)\n", http.post("/v1/messages", json=body).text)
    deltas = [json.loads(event).get("delta", {}) for event in events]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"a": "x'


def test_a_call_is_text_where_the_request_has_no_tools(serve_text):
    output = OUTPUTS["hermes"]["one call"]
    http = serve_text(output.text, TEMPLATE.replace("MARKERS", "<tool_call>"))
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        (choice,) = chat(http, **fields).json()["choices"]
        assert choice["message"]["content"] == output.text
        assert choice["finish_reason"] == "stop"


def test_tokens_of_held_back_text_keep_their_log_probabilities(serve_text):
    output = OUTPUTS["hermes"]["one call"]
    http = serve_text(output.text, TEMPLATE.replace("MARKERS", "<tool_call>"))
    events = events_of(chat(http, tools=TOOLS, stream=True, logprobs=True))
    entries = [
        entry["token"]
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(entries).startswith(output.text)


def test_a_conversation_with_calls_and_results_reaches_the_template(serve_text):
    http = serve_text("Sunny.", TEMPLATE.replace("MARKERS", "<tool_call>"))
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "abc", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "sunny"}]},
    ]
    assert chat(http, messages=messages, tools=TOOLS).status_code == 200
    (request,) = http.engine.requests
    body = {"tokens": request.prompt_token_ids}
    assert http.post("/detokenize", json=body).json()["prompt"] == (
        '[{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]'
        "system:Be brief.;user:Hi;assistant:!Paris;tool:sunny;"
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "the tools are get_weather",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "required"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "custom"),
        ({"tools": TOOLS}, "tools", "--tool-call-parser"),
        ({"tools": TOOLS, "chat_template": "{{ messages }}"}, "tools", "does not use tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "does not use it"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None, "enable_thinking"),
        *(
            ({"chat_template_kwargs": {name: []}}, f"chat_template_kwargs.{name}", "omit it")
            for name in ("messages", "tools", "self", "compiled", "special_tokens")
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "omit"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]},
            "messages[0].tool_calls[0].function.arguments",
            "no JSON object",
        ),
        (
            {"tools": TOOLS[:1] * 1025},
            "tools",
            "there are 1025 tools, the limit is 1024; offer fewer",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(http_of_refusals, fields, param, words):
    response = chat(http_of_refusals, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_the_parser_can_be_named(serve_text):
    output = OUTPUTS["pythonic"]["one call"]
    http = serve_text(output.text, tool_call_parser="pythonic")
    (choice,) = chat(http, tools=TOOLS).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_a_field_of_its_own(serve_text, stream):
    http = serve_text("Two and two.\n</think>\n\nFour.", THINKS)
    thought, said = "Two and two.\n", "\n\nFour."
    assert answered(http, stream=stream) == (said, thought, [], "stop")
    assert answered(http, stream=stream, include_reasoning=False) == (said, "", [], "stop")
    assert "reasoning" not in chat(http, stream=stream, include_reasoning=False).text


def test_a_model_that_is_told_not_to_think_answers_at_once(serve_text):
    http = serve_text("Four.", THINKS)
    (choice,) = chat(http, chat_template_kwargs={"enable_thinking": False}).json()["choices"]
    assert choice["message"]["content"] == "Four."
    assert "reasoning" not in choice["message"]


def test_reasoning_stays_in_the_text_if_the_server_was_told_so(serve_text):
    http = serve_text("Two.</think>4", THINKS, reasoning_parser="none")
    (choice,) = chat(http).json()["choices"]
    assert choice["message"]["content"] == "Two.</think>4"


def test_calls_behind_reasoning_are_found(serve_text):
    output = OUTPUTS["hermes"]["one call"]
    template = TEMPLATE.replace("MARKERS", "<tool_call>") + "<think>{# </think> #}"
    http = serve_text(f"I call <tool_call>.</think>\n\n{output.text}", template)
    content, reasoning, calls, reason = joined(events_of(chat(http, tools=TOOLS, stream=True)))
    assert (content, reasoning, tuple(calls)) == ("", "I call <tool_call>.", output.calls)
    assert reason == "tool_calls"


def test_channels_of_harmony_are_reasoning_content_and_calls(serve_text):
    markers = "<|channel|>analysis<|message|> <|channel|>commentary "
    http = serve_text(
        "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        TEMPLATE.replace("MARKERS", markers),
    )
    content, reasoning, calls, reason = joined(events_of(chat(http, tools=TOOLS, stream=True)))
    assert (content, reasoning, calls) == ("", "I ask.", [("get_weather", '{"city": "Paris"}')])
    assert reason == "tool_calls"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    for fields, param in (
        ({"tools": TOOLS, "tool_choice": "required"}, "functions.get_weather"),
        ({"response_format": schema}, "final"),
    ):
        assert chat(http, **fields).status_code == 200
        asked = http.engine.requests[-1].sampling_params.structured_output
        assert param in asked.text and "analysis" in asked.text and asked.reasoning is None
    assert chat(http, structured_outputs={"regex": "a+"}).status_code == 200
    asked = http.engine.requests[-1].sampling_params.structured_output
    assert asked.reasoning.end == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_a_stream_that_waits_gets_its_headers_and_comments(serve, monkeypatch):
    monkeypatch.setattr("frontend.http.event_stream.BEGIN_S", 0.1)
    monkeypatch.setattr("frontend.http.event_stream.COMMENT_S", 0.1)

    def late(_request, _num_generated):
        time.sleep(0.7)
        return ids_of("x")[0]

    http = serve(next_token=late)
    body = {"model": "fake", "messages": HELLO, "max_tokens": 1, "stream": True}
    http.get("/v1/models")
    for path, comment, first in (
        ("/v1/chat/completions", ": waiting\n\n", '"delta":{"role":"assistant"'),
        ("/v1/messages", 'event: ping\ndata: {"type":"ping"}\n\n', '"type":"message_start"'),
    ):
        num_before = http.engine.num_tokens
        with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            assert http.engine.num_tokens == num_before
            text = "".join(response.iter_text())
        assert text.count(comment) >= 3
        said = [each for each in text.split("\n\n") if each and f"{each}\n\n" != comment]
        assert first in said[0]
        assert said[-1] == "data: [DONE]" or "message_stop" in said[-1]


NAMED = {
    "default": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
    "tool_use": TEMPLATE.replace("MARKERS", MARKERS["hermes"]),
    "rag": "RAG{{ messages[0].content }}",
}


def test_with_tools_the_template_for_tools_is_used_and_its_parser(serve_text):
    http = serve_text(OUTPUTS["hermes"]["text, then two calls"].text, NAMED)
    answer = chat(http, tools=TOOLS).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    asked = {"messages": HELLO, "tools": TOOLS}
    prompts = [
        http.post("/tokenize", json=asked | more).json()["tokens"]
        for more in ({}, {"tools": None}, {"tools": None, "chat_template": "rag"})
    ]
    texts = [http.post("/detokenize", json={"tokens": each}).json()["prompt"] for each in prompts]
    assert texts[0].startswith('[{"type": "function"')
    assert texts[1:] == ["user:Hi;", "RAGHi"]
    assert http.engine.requests[0].prompt_token_ids == prompts[0]


def test_a_template_that_the_model_has_not_is_refused_with_the_names_that_there_are(serve_text):
    http = serve_text("x", NAMED)
    response = chat(http, chat_template="tools")
    assert response.status_code == 400
    assert "by name are: tool_use, rag" in response.json()["error"]["message"]
