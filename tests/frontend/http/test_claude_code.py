"""What Claude Code 2.1.197 sends (`claude_code.jsonl`, recorded, its texts cut), and what fields of
Anthropic's API mean here."""

import json
from pathlib import Path
from typing import get_args, get_type_hints

import fake_model
import pytest
from fake_model import EOS_ID, TOKENIZER, byte_tokenizer, ids_of
from http_server import TEMPLATE

from frontend.http.anthropic.bodies import Tool

RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("claude_code.jsonl").read_text().splitlines()
]
WITH_CALLS = TEMPLATE.replace("MARKERS", "<tool_call>").replace(".city", "")
CALL = '<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call>'
HELLO = [{"role": "user", "content": "Hello"}]
THINKS = (
    "{% if reasoning_effort %}{{ reasoning_effort }}!{% endif %}"
    + TEMPLATE
    + "<think>{# </think> #}"
)
"""Its marks are several tokens each."""


@pytest.fixture
def agent_server(serve):
    """(what the model says, its template) -> a client of a server with room for an agent."""

    def start(text, template=WITH_CALLS):
        ids = [*ids_of(text), EOS_ID]
        return serve(
            next_token=lambda _request, number: ids[number],
            chat_template=template,
            model_fields={"max_model_len": 20_000},
        )

    return start


def ask(http, **fields):
    body = {"model": "fake", "max_tokens": 90, "messages": HELLO, **fields}
    return http.post("/v1/messages", json=body)


def prompt_of(http):
    return TOKENIZER.decode(http.engine.requests[-1].prompt_token_ids)


def events_of(response):
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.split("\n") if line[:6] == "data: "]


def test_each_of_its_requests_is_a_stream_whose_tokens_were_counted(agent_server):
    http = agent_server("I look." + CALL)
    for sent in RECORDED[:4]:
        headers, body = sent["headers"], sent["body"]
        events = events_of(http.post(sent["path"], json=body, headers=headers))
        kinds = [each["type"] for each in events]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        usage = events[-2]["usage"]
        prompt = [usage[name] for name in usage if name != "output_tokens"]
        num_tokens = len(http.engine.requests[-1].prompt_token_ids)
        assert sum(prompt) == num_tokens
        if body["tools"]:
            assert events[-2]["delta"]["stop_reason"] == "tool_use"
            assert prompt == [num_tokens % 16, num_tokens // 16 * 16 - 3, 3]
        else:
            assert usage["cache_creation_input_tokens"] == 0
        unsent = ("max_tokens", "metadata", "stream")
        counted = {name: body[name] for name in body if name not in unsent}
        answer = http.post("/v1/messages/count_tokens?beta=true", json=counted, headers=headers)
        assert answer.json() == {"input_tokens": num_tokens}
        assert "billing" not in prompt_of(http)


def test_a_result_of_a_tool_and_a_system_text_stand_where_templates_take_them(agent_server):
    http = agent_server("Done.")
    events_of(http.post(RECORDED[2]["path"], json=RECORDED[2]["body"]))
    _, _, told = prompt_of(http).partition("}]system:You are a Claude agent")
    assert told.count("system:") == 0
    assert (
        "Run echo and tell me\n<system-reminder>\nAvailable agent types for the Agent tool:" in told
    )
    call = "{'command': 'echo hi-$((40+2))', 'description': 'say'}"
    assert told.endswith(f"\n</system-reminder>;assistant:I look.!{call};tool:hi-42;")


def test_a_tool_that_runs_at_the_provider_is_refused_by_name(agent_server):
    sent = RECORDED[4]
    response = agent_server("").post(sent["path"], json=sent["body"])
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("tools[0].type: 'web_search_20250305' is not supported")


def test_tools_that_its_clients_run_have_their_schemas(agent_server):
    http = agent_server("x")
    literal, _ = get_args(get_type_hints(Tool)["type"])
    kinds = [each for each in get_args(literal) if each != "custom"]
    assert ask(http, tools=[{"type": each, "name": each} for each in kinds]).status_code == 200
    offered = json.loads(prompt_of(http).partition("system:")[0].partition("user:")[0])
    names = [each["function"]["name"] for each in offered]
    assert names == [each for each in kinds if "search" not in each]
    assert all("command" in each["function"]["parameters"]["properties"] for each in offered)
    examples = [{"a": 1}]
    tool = {"name": "f", "input_schema": {}, "description": "d", "input_examples": examples}
    assert ask(http, tools=[tool | {"defer_loading": True}]).status_code == 200
    assert '"d\\nExample of input: {\\"a\\": 1}"' in prompt_of(http)
    assert "tools[0].input_schema is missing" in ask(http, tools=[{"name": "f"}]).text


THOUGHT = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "A"}]


def test_documents_are_texts(agent_server):
    http = agent_server("x")
    text = {"type": "text", "text": "a"}
    plain = {"type": "text", "media_type": "text/plain", "data": "long"}
    blocks = {"type": "content", "content": [text]}
    for content, rendered in (
        (
            {"type": "document", "title": "T", "source": plain},
            '<document title="T">\nlong\n</document>',
        ),
        (
            {"type": "document", "source": blocks, "citations": {"enabled": False}},
            "<document>\na\n</document>",
        ),
        (
            {"type": "search_result", "title": "T", "source": "http://x", "content": [text]},
            '<search_result title="T" source="http://x">\na\n</search_result>',
        ),
    ):
        result = {"type": "tool_result", "tool_use_id": "t", "content": [content]}
        for block, role in ((content, "user"), (result, "tool")):
            assert ask(http, messages=[{"role": "user", "content": [block]}]).is_success
            assert prompt_of(http) == f"{role}:{rendered};"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "document", "source": {"type": "base64"}}, "source.type: 'base64'"),
        (
            {
                "type": "document",
                "source": {"type": "text"},
                "citations": {"enabled": True},
            },
            "citations.enabled",
        ),
        ({"type": "server_tool_use", "id": "x", "name": "y", "input": {}}, "'server_tool_use'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(http_of_refusals, block, words):
    response = ask(http_of_refusals, messages=[{"role": "user", "content": [block]}])
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_fields_of_a_provider_are_hints_or_refused_by_name(agent_server):
    http = agent_server("x")
    for fields in (
        {"speed": "fast", "inference_geo": "eu"},
        {"fallbacks": "default"},
        {"mcp_servers": []},
    ):
        assert ask(http, **fields).status_code == 200
    edit = {"type": "clear_tool_uses_20250919"}
    for name, value in (
        ("mcp_servers", [{"type": "url"}]),
        ("container", "c"),
        ("context_management", {"edits": [edit]}),
        ("thread", {"type": "create"}),
    ):
        response = ask(http, **{name: value})
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]


def test_thinking_of_earlier_turns_is_kept_as_asked(agent_server):
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }};{% endfor %}"
    )
    http = agent_server("x", template)
    conversation = [*HELLO, {"role": "assistant", "content": THOUGHT}] * 2 + HELLO
    for keep, expected in (
        ({"keep": "all"}, ["Hm.A", "Hm.A"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ["Hm.A", "Hm.A"]),
        ({}, ["A", "Hm.A"]),
    ):
        edits = [{"type": "clear_thinking_20251015", **keep}]
        assert ask(http, messages=conversation, context_management={"edits": edits}).is_success
        said = [each[10:] for each in prompt_of(http).split(";") if each.startswith("assistant:")]
        assert said == expected
    passing = {"role": "system", "content": "now", "clear_at": "next_user_message"}
    assert ask(http, messages=[*HELLO, passing, *HELLO]).is_success
    assert "now" not in prompt_of(http)


def test_thinking_that_is_omitted_comes_back_in_its_signature(agent_server):
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{% endfor %}"
    http = agent_server("Hm, \u00fc.</think>Yes.", template + THINKS)
    thinking = {"type": "adaptive", "display": "omitted"}
    (block, _) = ask(http, thinking=thinking).json()["content"]
    events = events_of(ask(http, thinking=thinking, stream=True))
    deltas = [each["delta"] for each in events if "delta" in each]
    assert [each["type"] for each in deltas[:2]] == ["signature_delta", "text_delta"]
    assert block == {"type": "thinking", "thinking": "", "signature": deltas[0]["signature"]}
    redacted = {"type": "redacted_thinking", "data": "?"}
    said = {"role": "assistant", "content": [redacted, block, {"type": "text", "text": "Yes."}]}
    assert ask(http, messages=[*HELLO, said, *HELLO]).is_success
    assert "assistant:Hm, \u00fc.|" in prompt_of(http)


def test_effort_reaches_a_template_that_reads_it(agent_server):
    http = agent_server("x</think>", THINKS)
    for effort, told in (("low", "low"), ("max", "high")):
        assert ask(http, output_config={"effort": effort}).is_success
        assert prompt_of(http).startswith(f"{told}!")
    assert ask(agent_server("x"), output_config={"effort": "low"}).is_success


def test_a_budget_of_thinking_ends_it_where_its_marks_are_tokens(agent_server, monkeypatch):
    asked = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    http = agent_server("x</think>", THINKS)
    assert ask(http, **asked).is_success
    assert http.engine.requests[-1].sampling_params.thinking is None

    def with_marks():
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens(["<think>", "</think>"])
        return tokenizer

    monkeypatch.setattr(fake_model, "byte_tokenizer", with_marks)
    http = agent_server("x", THINKS)
    assert ask(http, **asked).is_success
    assert http.engine.requests[-1].sampling_params.thinking.max_tokens == 1024
    assert ask(http, **asked | {"max_tokens": 1025}).is_success
    assert http.engine.requests[-1].sampling_params.thinking is None, "it cannot be reached"


def test_a_model_that_does_not_think_may_be_asked_to_think_if_it_likes(http):
    assert ask(http, thinking={"type": "adaptive"}).is_success


def test_models_have_anthropics_form_for_its_clients(http):
    headers = {"anthropic-version": "2023-06-01"}
    listed = http.get("/v1/models", headers=headers).json()
    (model,) = listed.pop("data")
    assert listed == {"first_id": "fake", "last_id": "fake", "has_more": False}
    assert http.get("/v1/models/fake", headers=headers).json() == model
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", "fake", 512)
    assert http.get("/v1/models").json()["object"] == "list"
    assert http.head("/").status_code == 200


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(http_of_refusals):
    message = ask(http_of_refusals, system="x" * 600).json()["error"]["message"]
    assert message.startswith("prompt is too long: 619 tokens > 511 maximum")
