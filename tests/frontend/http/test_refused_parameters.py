"""What a request's own parameters make impossible, found when it runs: its fault in every API."""

import json

import httpx
import pytest
from http_server import serving

from protocol.outputs import FinishReason

WHY = "no token is possible"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
ASKED = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x", "max_tokens": 9},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "x"},
    "/api/chat": CHAT | {"max_tokens": None},
    "/api/generate": {"prompt": "x"},
}


def body_of(path, **more):
    return {name: value for name, value in ASKED[path].items() if value} | {"model": "fake"} | more


@pytest.fixture(params=[0, 3], ids=["before a token", "behind three"])
def http(start_engine, request):
    engine = start_engine(fail=lambda _, number: WHY if number == request.param else None)
    engine.failure_reason = FinishReason.REFUSED
    with serving(engine.address, "fake") as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http


def test_it_is_a_400_that_says_why_and_an_error_of_the_same_type_in_a_stream(http):
    for path in ASKED:
        response = http.post(path, json=body_of(path, stream=False))
        assert response.status_code == 400, path
        assert WHY in response.text
        if not path.startswith("/api/"):
            assert response.json()["error"]["type"] == "invalid_request_error"
        response = http.post(path, json=body_of(path, stream=True))
        if response.status_code == 200:
            check_last(path, next(line for line in response.text.splitlines() if WHY in line))
        else:  # found before the first event
            assert (response.status_code, WHY in response.text) == (400, True)


def check_last(path, line):
    error = json.loads(line.removeprefix("data: "))
    if path == "/v1/responses":
        assert error["response"]["error"]["code"] == "invalid_prompt"
    elif path.startswith("/api/"):
        assert error == {"error": WHY}
    else:
        assert error["error"]["type"] == "invalid_request_error"
