"""Tool calls and reasoning in Anthropic's and in Ollama's form, before a scripted engine."""

import json
import re

import pytest
from fake_model import TOKENIZER

TEMPLATE = (
    "{# <tool_call> </think> #}{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "!{{ c.function.arguments.city }}{% endfor %};{% endfor %}"
    "{{ '' if enable_thinking is defined and not enable_thinking else '<think>' }}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
ANTHROPIC_TOOLS = [{"name": "get_weather", "input_schema": SCHEMA, "eager_input_streaming": True}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXT = f"Paris?</think>I look.{CALL}{CALL.replace('Paris', 'Rome')}"
HELLO = [{"role": "user", "content": "Hi"}]
THINK = {"type": "adaptive"}


def ask(http, **fields):
    body = {"model": "fake", "max_tokens": 400, "messages": HELLO, **fields}
    return http.post("/v1/messages", json=body)


def chat(http, **fields):
    return http.post("/api/chat", json={"model": "fake", "messages": HELLO, **fields})


def streamed_message(response):
    """As Anthropic's package joins events."""
    message = {}
    blocks, inputs = [], {}
    for data in re.findall(r"data: (.+)\n", response.text):
        event = json.loads(data)
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = dict(event["delta"])
                match delta.pop("type"):
                    case "input_json_delta":
                        inputs.setdefault(event["index"], []).append(delta["partial_json"])
                    case "text_delta" | "thinking_delta":
                        ((name, text),) = delta.items()
                        blocks[-1][name] += text
            case "content_block_stop":
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads("".join(inputs[event["index"]]))
            case "message_delta":
                message.update(event["delta"])
    return {**message, "content": blocks}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_blocks_are_thoughts_text_and_calls(serve_text, stream):
    http = serve_text(TEXT, TEMPLATE)
    response = ask(http, tools=ANTHROPIC_TOOLS, thinking=THINK, stream=stream)
    message = streamed_message(response) if stream else response.json()
    thinking, text, *calls = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Paris?")
    assert text == {"type": "text", "text": "I look."}
    assert [call["type"] for call in calls] == ["tool_use", "tool_use"]
    assert [call["name"] for call in calls] == ["get_weather", "get_weather"]
    assert [call["input"] for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert len({call["id"] for call in calls}) == 2
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_anthropics_models_think_only_when_asked_to(serve_text, thinking):
    http = serve_text("Hello", TEMPLATE)
    assert ask(http, thinking=thinking).json()["content"] == [{"type": "text", "text": "Hello"}]


def test_a_call_and_its_result_reach_the_template_from_anthropics_blocks(serve_text):
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "9"}],
    }
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result]},
    ]
    http = serve_text("Nine", TEMPLATE)
    assert ask(http, messages=messages, tools=ANTHROPIC_TOOLS).status_code == 200
    prompt = TOKENIZER.decode(http.engine.requests[0].prompt_token_ids)
    count = http.post(
        "/v1/messages/count_tokens",
        json={"model": "fake", "messages": messages, "tools": ANTHROPIC_TOOLS},
    )
    assert count.json() == {"input_tokens": len(prompt)}
    schema, _, rest = prompt.partition("]")
    assert json.loads(schema + "]")[0]["function"]["parameters"] == SCHEMA
    assert rest == "user:Hi;assistant:Hm.!Paris;tool:9;"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ],
)
def test_what_anthropics_tools_cannot_do_is_refused_by_name(serve_text, fields, words):
    http = serve_text("x", TEMPLATE)
    response = ask(http, **{"tools": ANTHROPIC_TOOLS, **fields})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_message_has_thinking_and_calls(serve_text, stream):
    http = serve_text(TEXT, TEMPLATE)
    response = chat(http, tools=TOOLS, think=True, stream=stream)
    parts = [json.loads(line) for line in response.text.splitlines()]
    messages = [part["message"] for part in parts]
    assert "".join(message.get("thinking", "") for message in messages) == "Paris?"
    assert "".join(message["content"] for message in messages) == "I look."
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    assert calls == [
        {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}},
        {"index": 1, "name": "get_weather", "arguments": {"city": "Rome"}},
    ]
    assert parts[-1]["done_reason"] == "stop"


def test_ollamas_think_false_goes_to_the_template(serve_text):
    http = serve_text("Hello", TEMPLATE)
    message = chat(http, think=False, stream=False).json()["message"]
    assert message == {"role": "assistant", "content": "Hello"}
    body = {"model": "fake", "prompt": "Hi", "stream": False}
    assert http.post("/api/generate", json=body).json()["thinking"] == "Hello"
    raw = http.post("/api/generate", json={**body, "raw": True, "think": True}).json()
    assert (raw["response"], "thinking" in raw) == ("Hello", False), "its prompt opens no block"
    answer = http.post("/api/generate", json={**body, "think": False}).json()
    assert (answer["response"], "thinking" in answer) == ("Hello", False)
    shown = http.post("/api/show", json={"model": "fake"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


LEVELS = {  # what is read, and what is said for true, false, "low", "medium", "max", nothing
    "{% if enable_thinking %}T{% endif %}": "T-TTTT",
    "{% if tools and not thinking is defined %}{% endif %}{% if thinking %}T{% endif %}": "T-TTTT",
    "{% if thinking_mode == 'enabled' %}T{% endif %}": "T-TTTT",
    "{# think or thinking #}{% if thinking_effort %}{{ thinking_effort[0] }}{% endif %}": "--lmh-",
    "{% if reasoning_effort %}{{ reasoning_effort[0] }}{% endif %}{# 'max' #}": "--lmm-",
    "{% if reasoning_effort in ['high', 'low', 'no_think'] %}{{ reasoning_effort[0] }}"
    "{% endif %}": "hnlhhh",
}


def test_ollamas_think_is_what_the_template_reads(serve):
    for template, said in LEVELS.items():
        http = serve(chat_template=f"{{# </think> #}}{template}-")
        for think, word in zip((True, False, "low", "medium", "max", None), said, strict=False):
            assert chat(http, think=think, options={"num_predict": 1}).is_success
            prompt = TOKENIZER.decode(http.engine.requests[-1].prompt_token_ids)
            assert prompt.strip("-") == word.strip("-"), (template, think)


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_format_holds_behind_the_thinking(serve_text, stream):
    http = serve_text('Two.</think>{"city": "Rome"}', TEMPLATE)
    response = chat(http, format=SCHEMA, stream=stream, think=True)
    messages = [json.loads(line)["message"] for line in response.text.splitlines()]
    assert "".join(message.get("thinking", "") for message in messages) == "Two."
    assert json.loads("".join(message["content"] for message in messages)) == {"city": "Rome"}
    found = http.engine.requests[0].sampling_params.structured_output
    assert (found.kind, found.reasoning.end, found.reasoning.is_open) == ("json", "</think>", True)


def test_an_answer_of_ollamas_goes_back_into_the_conversation(serve_text):
    http = serve_text(TEXT, TEMPLATE)
    message = chat(http, tools=TOOLS, stream=False).json()["message"]
    result = {"role": "tool", "tool_name": "get_weather", "content": "9"}
    again = chat(http, messages=[*HELLO, message, result], think=False)
    assert again.status_code == 200
    prompt = TOKENIZER.decode(http.engine.requests[1].prompt_token_ids)
    assert prompt == "user:Hi;assistant:Paris?I look.!Paris!Rome;tool:9;"


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"think": "hard"}, "'hard' is not supported"), ({"tools": [{"type": "x"}]}, "tools[0]")],
)
def test_what_ollamas_models_cannot_do_is_refused_by_name(serve_text, fields, words):
    http = serve_text("x", TEMPLATE)
    response = chat(http, **fields)
    assert response.status_code == 400
    assert words in response.json()["error"]
