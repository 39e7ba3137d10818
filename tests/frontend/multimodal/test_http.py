"""Images over HTTP: OpenAI's, Anthropic's and Ollama's forms reach the engine as one."""

import base64
import json

import httpx
import pytest
from file_server import FileServer
from http_server import serving
from msgspec.structs import replace
from multimodal_model import (
    INFO,
    NUM_TOKENS,
    data_url,
    image_message,
    png,
)

TEXT = "what is it?"


@pytest.fixture
def http(multimodal_engine):
    with serving(multimodal_engine.address) as url, httpx.Client(base_url=url) as client:
        yield client


def answer(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_image_reaches_the_engine_by_each_api(http, multimodal_engine):
    data = base64.b64encode(png()).decode()
    parts = [{"type": "input_image", "image_url": data_url(png())}]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    block = {"type": "image", "source": source}
    blocks = [block, {"type": "text", "text": TEXT}]
    message = image_message(data_url(png()))
    turned = {"role": "user", "content": message["content"][::-1]}
    chat = {"messages": [turned], "max_tokens": 2}
    usage = answer(http, "/v1/chat/completions", chat)["usage"]
    number = len(f"user:{TEXT};") + NUM_TOKENS
    assert usage["prompt_tokens"] == number
    asked = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": blocks}]}
    told = answer(http, "/v1/messages", asked)["usage"]
    assert told["input_tokens"] + told["cache_read_input_tokens"] == number
    del asked["max_tokens"]
    assert answer(http, "/v1/messages/count_tokens", asked) == {"input_tokens": number}
    counted = {"messages": [turned], "add_generation_prompt": False}
    assert answer(http, "/tokenize", counted)["count"] == number
    turns = [{"role": "user", "content": [block]}, {"role": "user", "content": TEXT}]
    answer(http, "/v1/messages", {**asked, "max_tokens": 2, "messages": turns})
    options = {"model": "fake", "stream": False, "options": {"num_predict": 2}}
    turn = {"role": "user", "content": TEXT, "images": [data]}
    assert answer(http, "/api/chat", {**options, "messages": [turn]})["prompt_eval_count"] == number
    answer(http, "/api/generate", {**options, "prompt": TEXT, "images": [data]})
    items = [{"role": "user", "content": [*parts, {"type": "input_text", "text": TEXT}]}]
    answer(http, "/v1/responses", {"input": items, "max_output_tokens": 2})
    assert answer(http, "/api/show", {"model": "fake"})["capabilities"] == ["completion", "vision"]
    first, *others = multimodal_engine.requests
    assert len(others) == 5
    for other, frames in zip(others, multimodal_engine.frames[1:], strict=True):
        assert other.prompt_token_ids == first.prompt_token_ids
        assert other.multimodal_inputs == first.multimodal_inputs
        assert frames == multimodal_engine.frames[0]


def test_the_result_of_a_tool_may_be_an_image(http, multimodal_engine):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    shown = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    blocks = [{"type": "tool_result", "tool_use_id": "a", "content": shown}]
    asked = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": blocks}]}
    answer(http, "/v1/messages", asked)
    assert len(multimodal_engine.requests[0].multimodal_inputs) == 1


def test_an_image_may_stream(http):
    body = {"messages": [image_message(data_url(png()))], "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        events = [line for line in response.iter_lines() if line.startswith("data: {")]
    assert len(events) >= 3
    assert json.loads(events[-1][6:])["choices"][0]["finish_reason"] == "length"


def refusal(http, url):
    body = {"messages": [image_message(url)], "max_tokens": 2}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


def test_what_is_no_image_is_a_400_that_says_what_to_do(http, multimodal_engine):
    assert "no image of a known format; send one of PNG, JPEG" in refusal(http, data_url(b"hello"))
    assert not multimodal_engine.requests


def test_files_of_an_allowed_folder_are_read(multimodal_engine, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    folder = {"allowed_local_media_path": tmp_path}
    with serving(multimodal_engine.address, **folder) as url, httpx.Client(base_url=url) as http:
        body = {"messages": [image_message(f"file://{tmp_path}/a.png")], "max_tokens": 2}
        answer(http, "/v1/chat/completions", body)
        assert "not below" in refusal(http, "file:///etc/passwd")
    assert len(multimodal_engine.requests[0].multimodal_inputs) == 1


def test_an_image_of_the_network_is_refused_by_anthropics_api_too(http):
    source = {"type": "url", "url": "https://example.org/a.png"}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    told = http.post("/v1/messages", json={"model": "m", "max_tokens": 2, "messages": [message]})
    assert told.status_code in (400, 404)
    told = http.post("/v1/messages", json={"model": "fake", "max_tokens": 2, "messages": [message]})
    assert told.status_code == 400
    assert "--allow-media-url" in told.json()["error"]["message"]


def test_a_file_of_a_named_host_is_fetched(multimodal_engine):
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(png())}\r\n\r\n".encode()
    with FileServer(head + png()) as files:
        url = f"http://127.0.0.1:{files.port}/a.png"
        hosts = {"allow_media_url": (f"127.0.0.1:{files.port}",)}
        with serving(multimodal_engine.address, **hosts) as at, httpx.Client(base_url=at) as http:
            body = {"messages": [image_message(url)], "max_tokens": 2}
            answer(http, "/v1/chat/completions", body)
            source = {"type": "image", "source": {"type": "url", "url": url}}
            asked = {"model": "fake", "max_tokens": 2}
            answer(
                http, "/v1/messages", {**asked, "messages": [{"role": "user", "content": [source]}]}
            )
            assert "from hosts that" in refusal(http, "http://images.org/a.png")
    assert [len(each.multimodal_inputs) for each in multimodal_engine.requests] == [1, 1]


def test_sizes_are_compared_with_what_the_engine_takes(start_engine):
    engine = start_engine(multimodal=replace(INFO, max_input_bytes=100))
    with serving(engine.address) as url, httpx.Client(base_url=url) as http:
        assert "tensors of 9408 bytes, the limit of the engine is 100" in refusal(
            http, data_url(png())
        )
