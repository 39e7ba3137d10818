"""What holds for each API: readers that leave, requests that fail, and refusals in its own form."""

import json

import httpx
import pytest
from fake_engine import wait_until
from http_server import TEMPLATE, serving

from protocol.errors import ErrorCode
from protocol.outputs import FinishReason

HELLO = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 100},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 100},
    "/v1/messages": {"messages": HELLO, "max_tokens": 100},
    "/v1/responses": {"input": HELLO, "max_output_tokens": 100},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 100}},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 100}},
}
TYPES = {
    400: "invalid_request_error",
    405: "invalid_request_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


@pytest.fixture(params=BODIES)
def path(request):
    return request.param


def ask(http, path, **fields):
    return http.post(path, json={"model": "fake", "stream": False, **BODIES[path], **fields})


def refusal(path, response, status):
    """Its words. Anthropic's status of an overloaded server is one of its own."""
    is_overloaded = status == 503 and path.startswith("/v1/messages")
    assert response.status_code in (status, 529 if is_overloaded else status), response.text
    answer = response.json()
    error = answer["error"]
    if path.startswith("/api/"):
        assert answer.keys() == {"error"}
        return error
    if path.startswith("/v1/messages"):
        assert answer.keys() == {"type", "error"} and answer["type"] == "error"
        assert error.keys() == {"type", "message"}
        assert error["type"] == (TYPES | {500: "api_error", 503: "overloaded_error"})[status]
    else:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == (TYPES | {500: "internal_server_error"})[status]
    return error["message"]


def test_the_user_is_a_part_of_the_tenant(http, engine):
    ask(http, "/v1/completions")
    assert engine.requests[-1].tenant == "127.0.0.1"
    openai = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    for path, fields in (
        *((path, {name: "ann"}) for path in openai for name in ("user", "safety_identifier")),
        ("/v1/messages", {"metadata": {"user_id": "ann"}}),
    ):
        assert ask(http, path, **fields).status_code == 200
        assert engine.requests[-1].tenant == "127.0.0.1/ann", path


def test_vllms_extra_arguments_reach_the_engine(http, engine):
    """Whether it has logits processors that take them, the engine says."""
    given = {"strength": 0.5, "words": ["a", {"b": [None]}]}
    for path in BODIES.keys() - {"/v1/responses"}:
        assert ask(http, path, vllm_xargs=given).status_code == 200
        assert json.loads(engine.requests[-1].sampling_params.extra_args) == given
        assert "vllm_xargs" in refusal(path, ask(http, path, vllm_xargs=[1]), 400)
        too_long = ask(http, path, vllm_xargs={"a": "x" * 70_000})
        assert "the limit is 65536" in refusal(path, too_long, 400)


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = {
    "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
    "/v1/messages": [{"name": "f", "input_schema": SCHEMA}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
}


def test_a_forced_call_is_the_same_grammar_in_every_api(serve_text):
    http = serve_text("x", TEMPLATE.replace("MARKERS", "<tool_call>"))
    for path, choice, field in (
        ("/v1/chat/completions", "required", "tools[0].function.parameters"),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f"}}, None),
        ("/v1/messages", {"type": "any"}, "tools[0].input_schema"),
        ("/v1/messages", {"type": "tool", "name": "f"}, None),
        ("/v1/responses", "required", "tools[0].parameters"),
    ):
        assert ask(http, path, tools=TOOLS[path], tool_choice=choice).status_code == 200
        found = http.engine.requests[-1].sampling_params.structured_output
        assert (found.kind, found.field) == ("grammar", "tools")
        assert json.dumps('{"name": "f", "arguments": ') in found.text
        assert json.dumps(SCHEMA)[1:-1] in found.text
        if field is not None:
            assert f'"x-field": "{field}"' in found.text
            assert "(" in found.text.splitlines()[-1], "more calls may follow"


def test_a_schema_of_the_answer_is_the_same_in_every_api(http, engine):
    openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for path, fields, field in (
        ("/v1/chat/completions", {"response_format": openai}, "response_format.json_schema.schema"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format.schema",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            "text.format.schema",
        ),
        ("/api/chat", {"format": SCHEMA}, "format"),
        ("/api/generate", {"format": SCHEMA}, "format"),
    ):
        assert ask(http, path, **fields).status_code == 200, path
        found = engine.requests[-1].sampling_params.structured_output
        closed = {"additionalProperties": False} if field == "format" else {}  # as in Ollama
        assert (found.kind, found.field) == ("json", field)
        assert json.loads(found.text) == {**SCHEMA, **closed}


def test_a_reader_that_leaves_ends_its_request(serve, path):
    http = serve(step_s=0.02)
    body = {"model": "fake", **BODIES[path], "stream": True}
    with http.stream("POST", path, json=body) as response:
        chunks = response.iter_raw()  # closes the response when it is dropped
        next(chunks)
        assert http.engine.num_live == 1
    wait_until(lambda: len(http.engine.aborted) == 1)
    assert not http.engine.num_live
    http.engine.step = lambda: None  # before the first token, whole or as a stream
    for number, stream in enumerate((True, False), 2):
        with pytest.raises(httpx.ReadTimeout):
            http.post(path, json=body | {"stream": stream}, timeout=0.2)
        wait_until(lambda number=number: len(http.engine.aborted) == number)


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (FinishReason.ERROR, 500, "server_error"),
        (FinishReason.REFUSED, 400, "invalid_prompt"),  # by what it asks for itself
    ],
)
def test_a_failure_is_a_status_or_the_last_event(serve, reason, status, code, num_tokens):
    why = "no token is possible"
    http = serve(fail=lambda _request, number: why if number == num_tokens else None)
    http.engine.failure_reason = reason
    for path in BODIES:
        assert refusal(path, ask(http, path), status) == why
        response = ask(http, path, stream=True)
        if response.status_code != 200:  # found before the first event
            assert refusal(path, response, status) == why
            continue
        *_, last = (line for line in response.text.splitlines() if why in line)
        error = json.loads(last.removeprefix("data: "))
        if path == "/v1/responses":
            assert error["type"] == "response.failed"
            assert error["response"]["status"] == "failed"
            assert error["response"]["error"] == {"code": code, "message": why}
        else:
            refusal(path, httpx.Response(status, json=error), status)
        end = {"/v1/chat/completions": "[DONE]", "/v1/completions": "[DONE]"}.get(path, last)
        assert response.text.rstrip().endswith(end)
        assert ("event: error\n" in response.text) == (path == "/v1/messages")


def test_a_full_queue_is_a_429_that_says_when_to_come_again(serve):
    http = serve(refuse=lambda _: "128 requests wait", refusal_code=ErrorCode.QUEUE_FULL)
    for path in BODIES:
        for stream in (False, True):
            response = ask(http, path, stream=stream)
            assert "128 requests wait" in refusal(path, response, 429)
            assert int(response.headers["retry-after"]) >= 1


def test_an_engine_that_is_away_is_a_503(address):
    with serving(address, "fake") as url, httpx.Client(base_url=url, timeout=20) as http:
        for path in ("/v1/completions", "/v1/messages", "/api/chat"):
            refusal(path, ask(http, path), 503)
        assert http.get("/health").status_code == 503


def test_an_unknown_model_is_a_404_that_lists_the_models(http_of_refusals, path):
    message = refusal(path, ask(http_of_refusals, path, model="gpt-9"), 404)
    words = "model 'gpt-9' not found" if path[1] == "a" else "the model 'gpt-9' does not exist"
    assert f"{words}; this server has fake" in message


def test_an_unknown_path_and_another_method_have_the_same_form(http_of_refusals, path):
    assert "it takes POST" in refusal(path, http_of_refusals.get(path), 405)
    refusal(f"{path}/a/b", http_of_refusals.post(f"{path}/a/b"), 404)
    said = refusal("/v1/v1", http_of_refusals.post(f"/v1{path}"), 404)
    assert f"did you mean {path}?" in said
    for typed in ("/chat/completions", "/v1/chat/completion"):
        said = refusal(typed, http_of_refusals.post(typed), 404)
        assert "did you mean /v1/chat/completions?" in said


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_in_words_that_clients_look_for(
    http_of_refusals, path, stream
):
    """To shorten the conversation."""
    long = {name: "x" * 600 for name in ("prompt", "input") if name in BODIES[path]}
    said = long or {"messages": [{"role": "user", "content": "x" * 600}]}
    fields = {"truncate": False} if path.startswith("/api/") else {}
    response = ask(http_of_refusals, path, stream=stream, **said, **fields)
    if path == "/v1/responses" and stream:  # agents look for it there, and shorten then
        error = json.loads(response.text.strip().rpartition("data: ")[2])["response"]["error"]
        assert (error["code"], "limit is 511" in error["message"]) == (
            "context_length_exceeded",
            True,
        )
        return
    message = refusal(path, response, 400)
    assert "limit is 511" in message
    if path == "/v1/messages":
        assert message.startswith("prompt is too long: 606 tokens > 511 maximum")
    elif not path.startswith("/api/"):
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("role", ["robot", "User", "x" * 9999])
def test_a_role_that_neither_the_api_nor_the_template_names_is_refused(http_of_refusals, role):
    said = [*HELLO, {"role": role, "content": "x"}]
    for path in ("/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/responses"):
        name = "input" if path == "/v1/responses" else "messages"
        message = refusal(path, ask(http_of_refusals, path, **{name: said}), 400)
        assert len(message) < 500
        assert "role is '" + role[:90] in message
        assert ", it must be one of " in message or len(role) > 99
