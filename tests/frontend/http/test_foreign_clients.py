"""What programs send that were written for other servers, and bodies that are broken."""

import gzip
import json

import msgspec
import pytest
from http_server import TEMPLATE, events_of

from frontend.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from frontend.http.generation.requests import ChatCompletionRequest, CompletionRequest
from frontend.http.generation.tokenize import TokenizeRequest
from frontend.http.ollama.bodies import ChatRequest, GenerateRequest, ModelRequest
from frontend.http.responses.bodies import ResponsesRequest
from frontend.http.served_models import ServedModels
from frontend.http.server import make_config
from frontend.http.settings import ServerSettings

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": HELLO, "max_tokens": 2}
ROUTES = [
    ("/v1/chat/completions", ChatCompletionRequest, CHAT),
    ("/v1/completions", CompletionRequest, {"prompt": "Hello", "max_tokens": 2}),
    ("/v1/responses", ResponsesRequest, {"input": "Hello", "max_output_tokens": 2}),
    ("/v1/messages", MessagesRequest, {"model": "fake", **CHAT}),
    ("/v1/messages/count_tokens", CountTokensRequest, {"model": "fake", "messages": HELLO}),
    ("/api/chat", ChatRequest, {"model": "fake", "messages": HELLO, "stream": False}),
    ("/api/generate", GenerateRequest, {"model": "fake", "prompt": "Hello", "stream": False}),
    ("/api/show", ModelRequest, {"model": "fake"}),
    ("/tokenize", TokenizeRequest, {"prompt": "Hello"}),
]
WITH_CALLS = TEMPLATE.replace("MARKERS", "<tool_call>")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TWO_CALLS = "".join(
    f'<tool_call>{{"name": "f", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2)
)


def chat(http, **fields):
    return http.post("/v1/chat/completions", json={**CHAT, **fields})


def refusal(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_null_is_as_good_as_no_field_known_or_not(serve_text):
    http = serve_text("x")
    for path, body_type, body in ROUTES:
        names = [field.name for field in msgspec.structs.fields(body_type)]
        nulls = dict.fromkeys([*names, "guided_json", "reference_images"])
        response = http.post(path, json={**nulls, **body, "model": "fake"})
        assert response.status_code == 200, response.text


def test_a_null_among_a_templates_own_variables_is_one_of_them(http_of_refusals):
    fields = {"chat_template_kwargs": {"a": None}, "seed": None, "b": None}
    assert "a" in refusal(chat(http_of_refusals, **fields))["message"]


def test_fields_that_ask_for_what_is_done_anyway_are_taken(http):
    for fields in (
        {"top_logprobs": 0},
        {"prompt_cache_key": "k", "verbosity": "medium", "service_tier": "auto", "store": False},
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "bad_words": []},
        {"spaces_between_special_tokens": True, "return_tokens_as_token_ids": False},
        {"echo": False, "include_reasoning": True, "add_special_tokens": False},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"modalities": ["text"], "model": ""},
        {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": False}},
    ):
        assert chat(http, **fields).status_code == 200, fields


def test_what_asks_for_something_else_is_refused_by_name(http_of_refusals):
    for name, value in {
        "use_beam_search": True,
        "length_penalty": 2.0,
        "spaces_between_special_tokens": False,
        "verbosity": "high",
        "service_tier": "flex",
        "modalities": ["text", "audio"],
    }.items():
        assert refusal(chat(http_of_refusals, **{name: value}))["param"].startswith(name)


def test_responses_take_what_agents_send(http):
    body = {
        "input": HELLO,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "medium"},
        "tool_choice": "auto",
        "prompt_cache_key": "k",
        "top_logprobs": 0,
        "stream_options": {"include_obfuscation": False},
    }
    assert http.post("/v1/responses", json=body).status_code == 200


def test_an_answer_comes_back_as_clients_keep_it(http, engine):
    kept = {**chat(http).json()["choices"][0]["message"], "content": None, "function_call": None}
    kept["provider_specific_fields"] = {"refusal": None}
    assert chat(http, messages=[*HELLO, kept, *HELLO]).status_code == 200
    assert engine.requests[-1].prompt_token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_there_is_one(serve_text, stream):
    http = serve_text(TWO_CALLS, WITH_CALLS)
    response = chat(http, tools=TOOLS, parallel_tool_calls=False, max_tokens=400, stream=stream)
    bodies = events_of(response) if stream else [response.json()]
    messages = [c["delta" if stream else "message"] for each in bodies for c in each["choices"]]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"x": 1}
    assert bodies[-1]["choices"][0]["finish_reason"] == "tool_calls"
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked = {"model": "fake", "messages": HELLO, "max_tokens": 400, "tool_choice": choice}
    asked["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
    answer = http.post("/v1/messages", json=asked | {"stream": stream}).text
    assert answer.count('"type":"tool_use"') == 1
    asked = {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
    answer = http.post("/v1/responses", json={**asked, "parallel_tool_calls": False}).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert answer["parallel_tool_calls"] is False


def test_a_model_for_text_alone_does_not_embed(http_of_refusals):
    for path, name in (("/v1/embeddings", "input"), ("/api/embed", "input"),
                       ("/api/embeddings", "prompt")):  # fmt: skip
        response = http_of_refusals.post(path, json={"model": "fake", name: "x"})
        assert "this engine's tasks are generate" in str(refusal(response))


def test_a_thinking_budget_is_a_target(serve_text):
    http = serve_text("Hm.</think>Yes.", TEMPLATE + "<think>{# </think> #}")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = {"model": "fake", "messages": HELLO, "max_tokens": 100, "thinking": thinking}
    content = http.post("/v1/messages", json=asked).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]


def test_whole_numbers_beyond_64_bits_are_refused_or_cut(serve_text):
    http = serve_text("x")
    for number in (2**31, 2**63, 2**64, 10**30):
        assert "from 0 to" in refusal(chat(http, top_k=number))["message"]
        options = {"top_k": number}
        asked = {"model": "fake", "messages": HELLO, "stream": False, "options": options}
        assert "from 0 to" in refusal(http.post("/api/chat", json=asked))
        assert chat(http, max_tokens=number, zzz=None).status_code == 200  # the model's length


def test_idle_connections_are_kept_for_longer_than_clients_keep_them():
    models = ServedModels([])
    config = make_config(ServerSettings(), None, models)
    assert config.timeout_keep_alive > 90  # Go's; the longest of those that are known


def test_a_compressed_body_is_refused(http_of_refusals):
    body, headers = gzip.compress(json.dumps(CHAT).encode()), {"content-encoding": "gzip"}
    response = http_of_refusals.post("/v1/chat/completions", content=body, headers=headers)
    assert "gzip" in refusal(response, 415)["message"]
