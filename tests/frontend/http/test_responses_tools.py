"""Tools of the Responses API and what agents send, before a scripted engine."""

import json
import re

import pytest
from fake_model import saying
from http_server import TEMPLATE
from response_events import OPENAI, events_of, kinds_of, prompt_of, respond

from frontend.http.responses.bodies import ResponsesRequest
from frontend.http.responses.input_items import sealed
from frontend.http.responses.lark import regex_of_lark

HERMES = (
    "{# <tool_call> </think> #}{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "{{ m.role }}:{{ '[' ~ m.reasoning ~ ']' if m.reasoning else '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %};{% endfor %}{{ '<think>' if reasoning_effort is not defined else '' }}"
)
SCHEMA = {"type": "object", "properties": {"target": {"type": "string"}}}
PATCH = r"""start: begin hunk+ end
begin: "*** Begin" LF
hunk: ("+" | "-") /(.*)/ LF -> line
end: "*** End" LF?
%import common.LF
"""
LONG = {"model_fields": {"max_model_len": 16384}}


def function(name, **fields):
    return {"type": "function", "name": name, "strict": False, "parameters": SCHEMA, **fields}


def text(role, *texts):
    parts = [{"type": "input_text", "text": each} for each in texts]
    return {"type": "message", "id": f"msg_{texts[0]}", "role": role, "content": parts}


CODEX = {
    "model": "fake",
    "stream": True,
    "input": [
        text("developer", "You are a coding agent."),
        text("developer", "<skills>", "<permissions>"),
        text("user", "<environment>"),
        text("user", "Say bye."),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed("I look.")},
        {"type": "function_call", "status": "completed", "id": "fc_1", "name": "exec_command",
         "arguments": '{"cmd": "cat a"}', "call_id": "c1"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "hi"},
    ],
    "tools": [
        function("exec_command"),
        {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.",
         "tools": [function("close_agent", description="Ends one.")]},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2238d",
    "client_metadata": {"thread_id": "01a2238d", "x-codex-turn-metadata": "{}"},
}  # fmt: skip
"""What Codex 0.171 sends, cut."""


def call_of(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def http(serve):
    return serve(chat_template=HERMES, **LONG)


def says(http, said):
    http.engine.next_token = saying(said, then_eos=True)
    return http


def test_codex_is_answered(http):
    says(http, "Done?</think>Yes." + call_of("multi_agent_v1__close_agent", target="a"))
    events = events_of(http.post("/v1/responses", json=CODEX))
    assert kinds_of(events) == [
        *("created", "in_progress", "output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.done"),
        *("reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    reasoning, message, call = events[-1]["response"]["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Done?"}]
    assert reasoning["encrypted_content"] == sealed("Done?")
    assert message["content"][0]["text"] == "Yes."
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
    prompt = prompt_of(http)
    assert "web_search" not in prompt
    assert "Sub-agents.\\n\\nEnds one." in prompt
    assert prompt.endswith(
        "developer:You are a coding agent.\n\n<skills>\n<permissions>;".replace(
            "developer", "system"
        )
        + 'user:<environment>;user:Say bye.;assistant:[I look.]!exec_command{"cmd": "cat a"};'
        "tool:hi;<think>"
    )
    again = [*CODEX["input"], reasoning | {"content": None}, message, call]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "gone"}
    response = http.post("/v1/responses", json=CODEX | {"input": [*again, result]})
    assert response.status_code == 200
    assert prompt_of(http).endswith(
        'tool:hi;assistant:[Done?]Yes.!multi_agent_v1__close_agent{"target": "a"};tool:gone;<think>'
    )


def test_every_field_of_openais_requests_is_known_or_refused(http_of_refusals):
    refused = {"access_programs", "context_management", "conversation", "moderation", "prompt"}
    assert {*OPENAI["fields"]} - refused == {*OPENAI["fields"]} & {
        *ResponsesRequest.__struct_fields__
    }
    for name in refused:
        response = respond(http_of_refusals, **{name: {"id": "x"}})
        assert response.json()["error"]["param"] == name


CALLS = {
    "custom": (
        {"type": "custom", "name": "sh", "description": "A shell."},
        call_of("sh", input='say "ä\U0001f600"\n'),
        {"type": "custom_tool_call", "name": "sh", "input": 'say "ä\U0001f600"\n'},
    ),
    "custom that is written otherwise": (
        {"type": "custom", "name": "sh"},
        call_of("sh", command="ls"),
        {"type": "custom_tool_call", "name": "sh", "input": "ls"},
    ),
    "local_shell": (
        {"type": "local_shell"},
        call_of("local_shell", command=["ls"]),
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    ),
    "shell": (
        {"type": "shell", "environment": {"type": "local"}},
        call_of("shell", commands=["ls"], timeout_ms=9),
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 9}},
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        call_of("apply_patch", type="update_file", path="a", diff="+b"),
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "a", "diff": "+b"},
        },
    ),
    "tool_search": (
        {"type": "tool_search", "execution": "client", "description": "Finds.",
         "parameters": {"type": "object"}},
        call_of("tool_search", query="mail"),
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "mail"}},
    ),
}  # fmt: skip
OUTPUTS = {
    "custom_tool_call": {"type": "custom_tool_call_output", "output": "done"},
    "local_shell_call": {"type": "local_shell_call_output", "output": "done"},
    "shell_call": {"type": "shell_call_output", "output": [{"stdout": "done", "stderr": ""}]},
    "apply_patch_call": {"type": "apply_patch_call_output", "status": "completed"},
    "tool_search_call": {"type": "tool_search_output", "tools": [function("mail")]},
}


def test_a_call_is_an_item_of_its_tools_type_and_is_read_back(http):
    for tool, said, wanted in CALLS.values():
        says(http, "</think>" + said)
        events = events_of(respond(http, tools=[tool], stream=True))
        (item,) = events[-1]["response"]["output"]
        assert {name: item.get(name) for name in wanted} == wanted
        deltas = [each["delta"] for each in events if each["type"].endswith("input.delta")]
        if wanted["type"] == "custom_tool_call":
            assert "".join(deltas) == wanted["input"]
            assert len(deltas) > 1 or wanted["input"] == "ls"
        (whole,) = respond(http, tools=[tool]).json()["output"]
        assert whole | {"id": 0, "call_id": 0} == item | {"id": 0, "call_id": 0}
        result = {"call_id": item["call_id"], **OUTPUTS[item["type"]]}
        says(http, "</think>Ja.")
        response = respond(http, [text("user", "Hi"), item, result], tools=[tool])
        assert response.status_code == 200, response.text
        prompt = prompt_of(http)
        name = json.loads(said.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"]
        assert f"assistant:!{name}" in prompt
        assert '"name": "mail"' in prompt or "done" in prompt or "completed" in prompt


def test_tools_that_nobody_here_runs_are_left_out(http):
    hosted = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp",
              "computer_use_preview", "tool_search", "new_in_2030")  # fmt: skip
    says(http, "</think>Ja.")
    tools = [{"type": kind, "anything": 1} for kind in hosted]
    answer = respond(http, tools=[*tools, function("f")], include=["file_search_call.results"])
    assert answer.status_code == 200, answer.text
    assert answer.json()["tools"][:-1] == tools
    assert not any(kind in prompt_of(http) for kind in hosted)
    calls = ("web_search_call", "file_search_call", "code_interpreter_call",
             "image_generation_call", "mcp_list_tools")  # fmt: skip
    items = [{"type": kind, "id": "x", "queries": ["q"], "status": "done"} for kind in calls]
    called = {"type": "mcp_call", "id": "m", "server_label": "s", "name": "f", "arguments": "{}",
              "output": "fine"}  # fmt: skip
    assert respond(http, [text("user", "Hi"), *items, called]).status_code == 200
    assert prompt_of(http) == "user:Hi;assistant:!s__f{};tool:fine;<think>"


def test_tools_that_nobody_here_runs_are_refused_by_option(serve):
    http = serve(settings={"unknown_tools": "refuse"})
    for fields, param in (
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"given": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ):
        error = respond(http, **fields).json()["error"]
        assert error["param"] == param
        assert "web_search" in error["message"]


def test_a_choice_of_tools_is_by_their_own_names(http):
    says(http, "</think>Ja.")
    tools = [function("f"), {"type": "custom", "name": "c"}, {"type": "shell"}]
    group = {"type": "namespace", "name": "n", "description": "", "tools": [function("f")]}
    own = {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "own"}]}
    more = {"type": "additional_tools", "role": "developer", "tools": [own]}
    for choice, name in (
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "f", "namespace": "n"}, "n__f"),
        ({"type": "custom", "name": "c"}, "c"),
        ({"type": "custom", "name": "own"}, "own"),
        ({"type": "shell"}, "shell"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}, "shell"),
    ):
        given = [more, text("user", "Hi")]
        response = respond(http, given, tools=[*tools, group], tool_choice=choice)
        assert response.status_code == 200, response.text
        assert response.json()["tool_choice"] == choice
        grammar = http.engine.requests[-1].sampling_params.structured_output.text
        assert json.dumps(f'{{"name": "{name}"')[1:-1] in grammar
        assert grammar.count("arguments") == 1


def test_a_grammar_of_a_custom_tool_is_told_and_enforced(http):
    says(http, "</think>Ja.")
    form = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    tool = {"type": "custom", "name": "patch", "description": "Edits.", "format": form}
    for syntax, definition, pattern in (
        ("lark", PATCH, regex_of_lark(PATCH)),
        ("regex", "[ab]+", "[ab]+"),
    ):
        own = tool | {"format": form | {"syntax": syntax, "definition": definition}}
        assert respond(http, tools=[own]).status_code == 200
        assert json.dumps(definition)[1:-1] in prompt_of(http)
        grammar = http.engine.requests[-1].sampling_params.structured_output.text
        assert json.dumps(f"^(?:{pattern})$") in grammar
    nested = form | {"definition": 'start: "(" start? ")"'}
    assert respond(http, tools=[tool | {"format": nested}]).status_code == 200
    assert http.engine.requests[-1].sampling_params.structured_output is None


@pytest.mark.parametrize(
    ("grammar", "matches", "others"),
    [
        (PATCH, ["*** Begin\n+a\n-\n*** End\n", "*** Begin\n+a\n*** End"], ["*** End"]),
        (
            'start: [SIGN] INT ("," INT)*\nSIGN.2: "+" | "-"\n%import common.INT',
            ["-1,2", "1"],
            [""],
        ),
        ('?start: a | b\na: "x"\n b: /y\\/z/ // note', ["x", "y/z"], ["y", "xy/z"]),
    ],
)
def test_a_regular_grammar_is_a_regular_expression(grammar, matches, others):
    found = regex_of_lark(grammar)
    assert all(re.fullmatch(found, each) for each in matches)
    assert not any(re.fullmatch(found, each) for each in others)


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" start?', "start: missing", '%ignore " "\nstart: "a"', 'a: "b"', "start: ~"],
)
def test_another_grammar_is_none(grammar):
    assert regex_of_lark(grammar) is None


def test_reasoning_has_levels_where_the_template_reads_them(http):
    says(http, "Ja.")
    for asked, told in (("none", "low"), ("high", "high"), ("max", "high"), (None, None)):
        answer = respond(http, reasoning={"effort": asked}).json()
        assert answer["reasoning"]["effort"] == asked
        assert prompt_of(http).endswith(";<think>" if told is None else ";")


def test_reasoning_of_earlier_turns_can_be_left_out(http):
    says(http, "</think>Ja.")
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [
        {"type": "reasoning_text", "text": "Hm."}]}  # fmt: skip
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "No."}]}
    items = [text("user", "a"), thought, said, text("user", "b")]
    respond(http, items, reasoning={"context": "all_turns"})
    assert prompt_of(http) == "user:a;assistant:[Hm.]No.;user:b;<think>"
    respond(http, items, reasoning={"context": "current_turn"})
    assert prompt_of(http) == "user:a;assistant:No.;user:b;<think>"


def test_a_text_has_log_probabilities_of_its_tokens(serve_text):
    http = serve_text("Hm.</think>Däs.", TEMPLATE + "<think>{# </think> #}")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = events_of(respond(http, stream=True, **asked))
    message = events[-1]["response"]["output"][1]["content"][0]
    spelled = b"".join(bytes(each["bytes"]) for each in message["logprobs"])
    assert spelled.decode() == message["text"] == "Däs."
    assert all(len(each["top_logprobs"]) == 2 for each in message["logprobs"])
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [e for each in deltas for e in each["logprobs"]] == message["logprobs"]
    assert respond(http, top_logprobs=2).json()["output"][1]["content"][0]["logprobs"] == []
