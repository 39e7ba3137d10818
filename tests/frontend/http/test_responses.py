"""The Responses API before a scripted engine: items, events in their order, and what is kept."""

import httpx
import pytest
from fake_model import expected_text
from http_server import TEMPLATE, key_file, serving
from response_events import events_of, kinds_of, prompt_of, respond
from tool_outputs import OUTPUTS

TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
HERMES = TEMPLATE.replace("MARKERS", "<tool_call>")


def test_a_text_is_answered_with_a_message(http):
    answer = respond(http, max_output_tokens=5).json()
    (item,) = answer["output"]
    assert item["type"] == "message"
    assert item["role"] == "assistant"
    (part,) = item["content"]
    assert part["text"] == expected_text("user:Hi;", 5)
    assert (answer["object"], answer["status"]) == ("response", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (8, 5, 13)


def test_the_events_of_a_text_come_in_openais_order(serve_text):
    events = events_of(respond(serve_text("Sunny."), stream=True))
    assert kinds_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(e["delta"] for e in events if e["type"].endswith("delta")) == "Sunny."
    last = events[-1]["response"]
    assert last["status"] == "completed"
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == "Sunny."
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


def test_reasoning_text_and_calls_are_items_each(serve_text):
    output = OUTPUTS["hermes"]["text, then two calls"]
    template = HERMES + "<think>{# </think> #}"
    http = serve_text(f"Think.</think>{output.text}", template)
    events = events_of(respond(http, tools=TOOLS, stream=True))
    text = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds_of(events) == [
        *("created", "in_progress"),
        *(*text, "reasoning_text.delta", "reasoning_text.done", *end),
        *(*text, "output_text.delta", "output_text.done", *end),
        *("output_item.added", *call),
        *("output_item.added", *call),
        "completed",
    ]
    items = events[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", *["function_call"] * 2]
    assert items[0]["content"][0]["text"] == "Think."
    calls = [(item["name"], item["arguments"]) for item in items[2:]]
    assert tuple(calls) == output.calls
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == items
    num_tokens = events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert 0 < num_tokens <= len("Think.</think>")
    whole = respond(http, tools=TOOLS).json()["output"]
    for one, other in zip(whole, items, strict=True):
        assert {**one, "id": 0, "call_id": 0} == {**other, "id": 0, "call_id": 0}


def test_a_conversation_of_items_reaches_the_template(serve_text):
    http = serve_text("Sunny.", HERMES)
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        call,
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
    ]
    assert respond(http, items, instructions="Be brief.").status_code == 200
    assert prompt_of(http) == "system:Be brief.;user:Weather?;assistant:Wait.!Rome;tool:sunny;"


def test_a_previous_response_is_continued_without_its_instructions(serve_text):
    http = serve_text("Ja.")
    first = respond(http, "Eins", instructions="Deutsch").json()
    second = respond(http, "Zwei", previous_response_id=first["id"]).json()
    assert prompt_of(http) == "user:Eins;assistant:Ja.;user:Zwei;"
    assert second["previous_response_id"] == first["id"]
    respond(http, "Drei", previous_response_id=second["id"])
    assert prompt_of(http) == "user:Eins;assistant:Ja.;user:Zwei;assistant:Ja.;user:Drei;"
    assert http.get(f"/v1/responses/{first['id']}").json() == first


def test_a_call_of_a_previous_response_gets_its_result(serve_text):
    http = serve_text(OUTPUTS["hermes"]["one call"].text, HERMES)
    (call,) = (first := respond(http, tools=TOOLS).json())["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    respond(http, [result], previous_response_id=first["id"])
    assert prompt_of(http) == "user:Hi;assistant:!Paris;tool:sunny;"


def test_a_streamed_response_is_there_when_its_last_event_comes(serve_text):
    http = serve_text("Ja.")
    last = events_of(respond(http, stream=True))[-1]["response"]
    assert http.get(f"/v1/responses/{last['id']}").json() == last


def test_what_is_not_stored_cannot_be_continued(serve_text):
    http = serve_text("Ja.")
    answer = respond(http, store=False).json()
    response = respond(http, previous_response_id=answer["id"])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "previous_response_not_found"
    assert http.get(f"/v1/responses/{answer['id']}").status_code == 404


def test_the_response_of_one_key_is_unknown_to_another(engine, tmp_path):
    entries = [{"name": name, "key": f"key-of-{name}"} for name in ("ann", "bob")]
    keys = key_file(tmp_path, *entries)
    with serving(engine.address, api_key_file=keys) as url:
        ann, bob = (
            httpx.Client(base_url=url, headers={"authorization": f"Bearer key-of-{name}"})
            for name in ("ann", "bob")
        )
        path = f"/v1/responses/{respond(ann, max_output_tokens=2).json()['id']}"
        assert ann.get(path).status_code == 200
        assert bob.get(path).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tool_choice": {"type": "function", "name": "z"}, "tools": TOOLS}, "tool_choice"),
        ({"given": []}, "input"),
        ({"background": True, "store": False}, "background"),
        ({"include": ["everything"]}, "include[0]"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1]"),
        ({"tools": [{"type": "function", "name": "f", "async": True}]}, "tools[0].async"),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "x"}}]},
            "tools[0].format.type",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [5]}}, "tool_choice.tools[0]"),
        (
            {"given": [{"type": "additional_tools", "tools": [{"type": "function"}]}]},
            "input[0].tools[0].name",
        ),
        ({"given": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"given": [{"type": "item_reference"}]}, "input[0].id"),
        ({"given": [{"type": "computer_call_output"}]}, "input[0].type"),
        (
            {"given": [{"type": "compaction", "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content",
        ),
        ({"given": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]}, "input[0].input"),
        ({"given": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {"given": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
        ),
        (
            {"given": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(http_of_refusals, fields, param):
    response = respond(http_of_refusals, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
