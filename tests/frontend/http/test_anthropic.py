"""Anthropic's routes before a scripted engine."""

import json
import re

import pytest
from fake_model import TOKENIZER, expected_text

HELLO = [{"role": "user", "content": "Hello"}]
RENDERED = "user:Hello;"


def ask(http, path="/v1/messages", headers=None, **fields):
    body = {"model": "fake", "max_tokens": 5, "temperature": 0, "messages": HELLO, **fields}
    return http.post(path, json=body, headers=headers)


def count(http, **fields):
    body = {"model": "fake", "messages": HELLO, **fields}
    return http.post("/v1/messages/count_tokens", json=body)


def events_of(response):
    """Name and data of each."""
    found = re.findall(r"event: (\w+)\ndata: (.+)\n\n", response.text)
    return [(name, json.loads(data)) for name, data in found]


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return body["error"]


def prompt_of(request):
    return TOKENIZER.decode(request.prompt_token_ids)


def test_a_conversation_is_answered_with_usage(http):
    response = ask(http)
    answer = response.json()
    assert answer["content"] == [{"type": "text", "text": expected_text(RENDERED, 5)}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "fake")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(RENDERED)
    assert usage["cache_read_input_tokens"] == 3
    assert usage["output_tokens"] == 5
    assert response.headers["request-id"]


def test_a_stream_says_the_same_in_events(http):
    response = ask(http, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == expected_text(RENDERED, 5)
    message = events[0][1]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert events[-2][1]["usage"]["output_tokens"] == 5
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"stop_sequences": ["wor"]}, "stop_sequence", "wor"),
        ({}, "end_turn", None),
        ({"max_tokens": 4}, "max_tokens", None),
    ],
)
def test_the_reason_why_it_ended(serve_text, stream, fields, reason, sequence):
    http = serve_text("hello world")
    response = ask(http, **{"max_tokens": 100, "stream": stream, **fields})
    answer = events_of(response)[-2][1]["delta"] if stream else response.json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_an_answer_that_fills_the_context_says_so(http):
    answer = ask(http, max_tokens=100_000).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"system": "Be brief"}, "system:Be brief;user:Hello;"),
        (
            {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            "system:a;user:Hello;",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "one"},
                    {"role": "user", "content": [{"type": "text", "text": "two"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
                    {"role": "user", "content": "four"},
                ]
            },
            "user:one\ntwo;assistant:three;user:four;",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Call"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": "5"},
                            {"type": "text", "text": "So?"},
                        ],
                    },
                ]
            },
            "user:Call;assistant:;tool:5;user:So?;",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "Ah"}]}, "user:Hello;assistant:Ah"),
    ],
)
def test_the_conversation_goes_through_the_chat_template(http, engine, fields, rendered):
    assert ask(http, **fields).status_code == 200
    assert prompt_of(engine.requests[-1]) == rendered
    assert count(http, **fields).json() == {"input_tokens": len(rendered)}
    assert len(engine.requests) == 1


def test_sampling_parameters_reach_the_engine(http, engine):
    ask(http, temperature=0.5, top_p=0.9, top_k=3)
    params = engine.requests[-1].sampling_params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"frobnicate": 1}, "'frobnicate'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "file"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "does not think"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(http_of_refusals, fields, words):
    error = error_of(ask(http_of_refusals, **fields), 400)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_an_older_version_of_the_api_is_refused(http):
    for version in ("2023-06-01", "2026-10-21"):
        assert ask(http, headers={"anthropic-version": version}).status_code == 200
    error = error_of(ask(http, headers={"anthropic-version": "2023-01-01"}), 400)
    assert "anthropic-version" in error["message"]


def test_a_key_is_taken_from_the_header_of_anthropics_clients(serve):
    http = serve(settings={"api_key": ("secret",)})
    assert ask(http, headers={"x-api-key": "secret"}).status_code == 200
    error = error_of(ask(http, headers={"x-api-key": "other"}), 401)
    assert error["type"] == "authentication_error"
    refused = http.get("/api/tags")
    assert refused.status_code == 401
    assert refused.json().keys() == {"error"}
    assert isinstance(refused.json()["error"], str)
