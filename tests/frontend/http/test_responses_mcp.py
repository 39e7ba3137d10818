"""Tools of the Responses API that this server runs, before a scripted engine."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from fake_engine import wait_until
from fake_model import TOKENIZER, saying
from response_events import events_of, kinds_of, prompt_of, respond

pytest.importorskip("mcp", reason="pip install engine-core[mcp]")

PROGRAM = f"{shlex.quote(sys.executable)} -IS {Path(__file__).with_name('tool_server.py')}"
TEMPLATE = (
    "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }},{% endfor %};"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "!{{ c.function.name }}{% endfor %};{% endfor %}"
)
CALL = '<tool_call>\n{"name": "%s", "arguments": {"text": "loud"}}\n</tool_call>'
CLIENTS = {"type": "function", "name": "clients", "parameters": {"type": "object"}}


def own(**fields):
    never = {"require_approval": "never", "allowed_tools": ["echo", "fail", "add-tool"]}
    return {"type": "mcp", "server_label": "own", **never, **fields}


@pytest.fixture
def start(serve):
    """(texts that the model says, one for each number of results that it has seen) -> a client."""

    def start(*texts, **settings):
        said = [saying(text, then_eos=True) for text in texts]

        def next_token(request, number):
            num_results = TOKENIZER.decode(request.prompt_token_ids).count("tool:")
            return said[min(num_results, len(said) - 1)](request, number)

        settings = {"mcp": (f"own={PROGRAM}", "bad=no-such-program"), **settings}
        http = serve(next_token=next_token, chat_template=TEMPLATE, settings=settings)
        if settings["mcp"]:
            listed = lambda: http.get("/v1/mcp/servers").json()["servers"]  # noqa: E731
            wait_until(lambda: listed()[0]["tools"] and "cannot run" in listed()[1]["problem"], 20)
        return http

    return start


def output_of(response):
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["status"] == "completed"
    return body["output"]


def types(items):
    return [each["type"] for each in items]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_run_until_the_model_answers(start, stream):
    http = start("I call." + CALL % "own__echo", CALL % "own__fail", "That is all.")
    response = respond(http, tools=[own()], stream=stream)
    if stream:
        events = events_of(response)
        body = events[-1]["response"]
        call = ["output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta"]
        call += ["mcp_call_arguments.done"]
        text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
        text += ["content_part.done", "output_item.done"]
        assert kinds_of(events) == [
            *("created", "in_progress", "output_item.added", "mcp_list_tools.in_progress"),
            *("mcp_list_tools.completed", "output_item.done", *text),
            *(*call, "mcp_call.completed", "output_item.done"),
            *(*call, "mcp_call.failed", "output_item.done", *text, "completed"),
        ]
        done = [each for each in events if each["type"] == "response.output_item.done"]
        assert [each["output_index"] for each in done] == [0, 1, 2, 3, 4]
        assert [each["item"] for each in done] == body["output"]
    else:
        body = response.json()
    listed, said, call, failed, answer = body["output"]
    assert listed["server_label"] == "own"
    assert [each["name"] for each in listed["tools"]] == ["echo", "add-tool", "fail"]
    assert listed["tools"][0]["input_schema"]["properties"] == {"text": {"type": "string"}}
    assert said["content"][0]["text"] == "I call."
    assert (call["type"], call["server_label"], call["name"]) == ("mcp_call", "own", "echo")
    assert (call["output"], call["error"], call["status"]) == ("loud", None, "completed")
    assert json.loads(call["arguments"]) == {"text": "loud"}
    assert (failed["name"], failed["output"], failed["status"]) == ("fail", None, "failed")
    assert failed["error"]["content"] == [{"type": "text", "text": "loud"}]
    assert answer["content"][0]["text"] == "That is all."
    prompts = [prompt_of(http, number) for number in range(3)]
    assert len(http.engine.requests) == 3
    assert prompts[0] == "own__echo,own__add-tool,own__fail,;user:Hi;"
    assert prompts[1] == f"{prompts[0]}assistant:I call.!own__echo;tool:loud;"
    assert "!own__fail;tool:{" in prompts[2]
    assert body["usage"]["input_tokens"] == sum(map(len, prompts)), "of all three"
    following = {"previous_response_id": body["id"], "tools": [own()]}
    assert types(output_of(respond(http, "Go on", **following))) == ["message"], "listed before"
    assert prompt_of(http).endswith("assistant:That is all.;user:Go on;")


def test_a_call_waits_for_the_clients_approval(start):
    http = start("I call." + CALL % "own__echo", "That is all.")
    tools = [own(require_approval={"never": {"tool_names": ["fail"]}})]
    body = respond(http, tools=tools).json()
    asked = body["output"][2]
    assert (asked["type"], asked["name"], asked["server_label"]) == (
        "mcp_approval_request",
        "echo",
        "own",
    )
    assert len(http.engine.requests) == 1
    approval = {"type": "mcp_approval_response", "approval_request_id": asked["id"]}
    given = [{"role": "user", "content": "Hi"}, *body["output"], approval | {"approve": True}]
    events = events_of(respond(http, given, tools=tools, stream=True))
    call, _ = events[-1]["response"]["output"]
    assert kinds_of(events)[2:6] == [
        *("output_item.added", "mcp_call.in_progress", "mcp_call.completed", "output_item.done"),
    ]
    assert (call["type"], call["output"]) == ("mcp_call", "loud")
    assert call["approval_request_id"] == asked["id"]
    assert call["id"] != asked["id"]
    assert prompt_of(http).endswith("user:Hi;assistant:I call.!own__echo;tool:loud;")
    again = [*given, *events[-1]["response"]["output"], {"role": "user", "content": "Go on"}]
    assert types(output_of(respond(http, again, tools=tools))) == ["message"], "it ran once"
    kept = {"previous_response_id": body["id"], "tools": tools}
    refused = approval | {"approve": False, "reason": "Too loud."}
    assert types(output_of(respond(http, [refused], **kept))) == ["message"]
    assert prompt_of(http).endswith("!own__echo;tool:The user refused this call. Too loud.;")
    for tools in ([own(allowed_tools=["fail"])], [CLIENTS]):
        refusal = respond(http, [approval | {"approve": True}], **kept | {"tools": tools})
        assert refusal.status_code == 400
        assert "or of a tool that `tools` does not have" in refusal.json()["error"]["message"]
    refusal = respond(http, [approval], **kept)
    assert refusal.json()["error"]["message"].endswith("approve is missing")
    other = approval | {"approve": True, "approval_request_id": "mcpr_other"}
    refusal = respond(http, [other], **kept | {"tools": [own()]})
    assert refusal.json()["error"]["param"] == "input[0]"


def test_a_call_that_is_cut_is_not_run(start):
    http = start(CALL % "own__echo")
    events = events_of(respond(http, tools=[own()], max_output_tokens=70, stream=True))
    call = events[-1]["response"]["output"][1]
    assert (events[-1]["type"], call["status"]) == ("response.incomplete", "incomplete")
    assert (call["output"], call["error"]) == (None, None)
    assert kinds_of(events)[-2:] == ["output_item.done", "incomplete"]


def test_the_clients_own_calls_end_the_answer_behind_ours(start):
    http = start(CALL % "own__echo" + CALL % "clients", "That is all.")
    output = output_of(respond(http, tools=[own(), CLIENTS]))
    assert types(output) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert output[1]["output"] == "loud"
    assert len(http.engine.requests) == 1


def test_calls_are_bounded(start):
    http = start(CALL % "own__echo")
    output = output_of(respond(http, tools=[own()], max_tool_calls=2))
    assert types(output) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert prompt_of(http).startswith(";user:Hi;"), "the last one is answered without tools"


def test_tools_of_other_servers_than_the_operators_are_refused_by_name(start):
    http = start("Hello.")
    for fields, param, told in (
        (
            {"server_url": "http://10.0.0.1/mcp"},
            "server_url",
            "is 'http://10.0.0.1/mcp', and",
        ),
        ({"server_label": "other"}, "server_label", "give one as server_label: own, bad"),
        ({"authorization": "secret"}, "authorization", "authorization"),
        ({"headers": {"x": "y"}}, "headers", "headers"),
        ({"connector_id": "connector_gmail"}, "connector_id", "connector_id"),
        ({"allowed_tools": {"read_only": True}}, "allowed_tools.read_only", "read_only"),
    ):
        refusal = respond(http, tools=[own(**fields)])
        assert refusal.status_code == 400, fields
        error = refusal.json()["error"]
        assert error["param"] == f"tools[0].{param}"
        assert told in error["message"]
    foreign = {"origin": "http://127.0.0.1:1"}
    body = {"input": "Hi", "tools": [own()]}
    assert http.post("/v1/responses", json=body, headers=foreign).status_code == 403
    refusal = respond(http, tools=[own(), own()])
    assert "there are two of 'own'" in refusal.json()["error"]["message"]
    assert not http.engine.requests


def test_a_server_that_is_away_is_told_in_its_list(start):
    http = start("Hello.")
    listed, answer = output_of(respond(http, tools=[own(server_label="bad")]))
    assert listed["tools"] == []
    assert "cannot run no-such-program" in listed["error"]
    assert answer["content"][0]["text"] == "Hello."
    events = events_of(respond(http, tools=[own(server_label="bad")], stream=True))
    assert "mcp_list_tools.failed" in kinds_of(events)


def test_without_servers_such_tools_are_passed_over(start):
    http = start("Hello.", mcp=())
    assert types(output_of(respond(http, tools=[own()]))) == ["message"]
