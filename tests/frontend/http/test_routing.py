"""Several engines of one model behind the server: sessions, and the router's metrics."""

import httpx
import pytest
from http_server import serving_models
from test_metrics import scrape

from frontend.async_llm import AsyncLLM
from frontend.http.served_models import ServedModel, ServedModels

CHAT = [{"role": "user", "content": "Hello"}]
COMPLETIONS = ("/v1/completions", {"prompt": "Hello"})
WAYS = {
    "header": (*COMPLETIONS, {}),
    "cache key": (*COMPLETIONS, {"prompt_cache_key": "KEY"}),
    "vLLM's session": (*COMPLETIONS, {"session_id": "KEY"}),
    "user of a chat": ("/v1/chat/completions", {"messages": CHAT}, {"user": "KEY"}),
    "safety identifier": ("/v1/chat/completions", {"messages": CHAT}, {"safety_identifier": "KEY"}),
    "cache key of a response": ("/v1/responses", {"input": "Hello"}, {"prompt_cache_key": "KEY"}),
    "user of a message": (
        "/v1/messages",
        {"messages": CHAT, "model": "small"},
        {"metadata": {"user_id": "KEY"}},
    ),
}


@pytest.fixture
def engines(start_engine, address):
    return [start_engine(at=f"{address}.{number}") for number in range(3)]


@pytest.fixture
def url(engines):
    addresses = [engine.address for engine in engines]
    made = ServedModel(lambda: AsyncLLM(addresses, routing_policy="session-sticky"), ["small"])
    with serving_models(ServedModels([made])) as url:
        yield url


def engine_of(engines, send):
    before = [len(engine.requests) for engine in engines]
    send().raise_for_status()
    (number,) = (n for n, engine in enumerate(engines) if len(engine.requests) > before[n])
    return number


def test_a_session_by_any_of_its_names_has_one_engine(engines, url):
    def ask(way, session, header=None):
        path, body, fields = WAYS[way]
        body = body | {"max_tokens": 1, "max_output_tokens": 1}
        del body["max_tokens" if path == "/v1/responses" else "max_output_tokens"]
        for name, value in fields.items():
            body[name] = session if value == "KEY" else {"user_id": session}
        header = session if way == "header" else header
        headers = {} if header is None else {"X-Session-Id": header}
        return engine_of(engines, lambda: httpx.post(url + path, json=body, headers=headers))

    sessions = [f"session {number}" for number in range(16)]  # all at one in 1 of 32,768 runs
    homes = [ask("header", each) for each in sessions]
    assert len(set(homes)) > 1
    for way in WAYS:
        assert [ask(way, each) for each in sessions[:3]] == homes[:3], way
    assert ask("cache key", "another", header=sessions[4]) == homes[4], "the header goes first"

    samples = scrape(url)
    labels = [("address", engine.address) for engine in engines]
    sent = [
        samples["engine_core_router_requests_total", each, ("model_name", "small")]
        for each in labels
    ]
    assert sent == [len(engine.requests) for engine in engines]
    tokens = {
        expected: samples[
            "engine_core_router_prompt_tokens_total",
            ("expected", expected),
            ("model_name", "small"),
        ]
        for expected in ("cached", "new")
    }
    prompts = [each.prompt_token_ids for engine in engines for each in engine.requests]
    assert sum(tokens.values()) == sum(map(len, prompts))
    own = (("clients", "own"), ("model_name", "small"))
    assert [samples["engine_core_router_load_tokens", each, *own] for each in labels] == [0, 0, 0]
