"""Tokens in, tokens out; and what requests are rendered to."""

import pytest
from fake_model import ids_of
from http_server import TEMPLATE, events_of

HELLO = [{"role": "user", "content": "Hi"}]
PATH = "/inference/v1/generate"


def generate(http, token_ids, status=200, **fields):
    sampling = fields.pop("sampling_params", {"max_tokens": 5, "temperature": 0})
    body = {"token_ids": token_ids, "sampling_params": sampling, **fields}
    response = http.post(PATH, json=body)
    assert response.status_code == status, response.text
    return response


@pytest.fixture
def http(serve):
    return serve(chat_template=TEMPLATE + "{% for d in documents or [] %}{{ d.text }}{% endfor %}")


def test_tokens_are_continued_with_tokens_whole_and_in_a_stream(http):
    sampling = {"max_tokens": 6, "temperature": 1, "seed": 4, "n": 2, "logprobs": 2}
    asked = {"sampling_params": sampling, "request_id": "mine"}
    answer = generate(http, ids_of("abc"), **asked).json()
    assert (answer["id"], answer["request_id"]) == ("generate-tokens-mine", "mine")
    assert answer["usage"]["completion_tokens"] == 12
    first, second = answer["choices"]
    assert first["token_ids"] != second["token_ids"]
    assert first["finish_reason"] == "length"
    entries = first["logprobs"]["content"]
    assert [each["token"] for each in entries] == [f"token_id:{n}" for n in first["token_ids"]]
    assert [len(each["top_logprobs"]) for each in entries] == [2] * 6
    assert not any(key in first for key in ("text", "message"))

    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of(generate(http, ids_of("abc"), **asked, **options))
    streamed = {0: [], 1: []}
    for each in (choice for event in events for choice in event["choices"]):
        streamed[each["index"]] += each["token_ids"]
    assert streamed == {0: first["token_ids"], 1: second["token_ids"]}
    assert last["usage"] == answer["usage"]


def test_a_stop_string_ends_tokens_and_without_one_no_text_is_made(http):
    whole = generate(http, ids_of("a")).json()["choices"][0]["token_ids"]
    text = http.post("/detokenize", json={"tokens": whole}).json()["prompt"]
    stop = {"max_tokens": 5, "temperature": 0, "stop": [text[2]]}
    choice = generate(http, ids_of("a"), sampling_params=stop).json()["choices"][0]
    assert choice["token_ids"] == whole[: text.index(text[2]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[2])


CHAT = {"messages": HELLO, "max_tokens": 7, "return_token_ids": True}
COMPLETION = {"prompt": "One", "return_token_ids": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT | {"temperature": 1, "seed": 5, "n": 2, "stop": ["zz"]}),
        (
            "chat/completions",
            CHAT | {"documents": [{"text": "A"}], "truncate_prompt_tokens": 4, "seed": 2},
        ),
        ("chat/completions", CHAT | {"temperature": 0, "logit_bias": {"5": 1.5}, "logprobs": True}),
        ("completions", COMPLETION | {"temperature": 0, "stop_token_ids": [3], "min_tokens": 2}),
        ("completions", COMPLETION | {"seed": 3, "prompt": [ids_of("A"), ids_of("B")]}),
        (
            "completions",
            COMPLETION | {"seed": 1, "structured_outputs": {"choice": ["a"]}, "top_k": 3},
        ),
    ],
)
def test_what_a_request_is_rendered_to_gives_its_tokens(http, path, body):
    rendered = http.post(f"/v1/{path}/render", json=body).json()
    assert not http.engine.requests
    answer = http.post(f"/v1/{path}", json=body).json()
    requests = len(http.engine.requests)
    found = []
    for each in rendered if isinstance(rendered, list) else [rendered]:
        again = http.post(PATH, json=each)
        assert again.status_code == 200, again.text
        found += [choice["token_ids"] for choice in again.json()["choices"]]
    assert found == [choice["token_ids"] for choice in answer["choices"]]
    own, others = http.engine.requests[:requests], http.engine.requests[requests:]
    for mine, other in zip(own, others, strict=True):
        assert mine.prompt_token_ids == other.prompt_token_ids
        if "seed" in body:
            assert mine.sampling_params == other.sampling_params
    if path == "chat/completions" and "truncate_prompt_tokens" not in body:
        assert rendered["prompt"] == "user:Hi;"
        assert rendered["token_ids"] == ids_of("user:Hi;")


def test_tokens_of_log_probabilities_are_named_by_ids_if_asked(http):
    fields = {"max_tokens": 2, "temperature": 0, "return_tokens_as_token_ids": True}
    asked = CHAT | fields | {"logprobs": True, "top_logprobs": 1}
    (choice,) = http.post("/v1/chat/completions", json=asked).json()["choices"]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    entries = choice["logprobs"]["content"]
    assert [each["token"] for each in entries] == names
    assert [each["top_logprobs"][0]["token"] for each in entries] == names
    text = bytes(byte for each in entries for byte in each["bytes"]).decode()
    assert text == choice["message"]["content"]
    asked = COMPLETION | fields | {"logprobs": 1, "echo": True}
    (choice,) = http.post("/v1/completions", json=asked).json()["choices"]
    all_ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in all_ids]
    assert choice["logprobs"]["top_logprobs"][-1].keys() == {f"token_id:{all_ids[-1]}"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "1000000"),
        ({"sampling_params": {"colour": 1}}, "sampling_params.colour"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"sampling_params": {"n": 3, "temperature": 0}}, "greedy"),
        ({"sampling_params": {"truncate_prompt_tokens": 1}}, "truncate_prompt_tokens"),
        ({"features": {}}, "features"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
def test_what_tokens_cannot_be_asked_with_is_refused_by_name(http_of_refusals, body, words):
    body = {"token_ids": [1], "sampling_params": {}, **body}
    error = http_of_refusals.post(PATH, json=body)
    assert error.status_code == 400
    assert words in error.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_the_prompt_comes_once(http, stream):
    asked = {"messages": HELLO, "max_tokens": 3, "return_prompt_text": True, "stream": stream}
    response = http.post("/v1/chat/completions", json=asked | {"truncation_side": "left"})
    bodies = events_of(response) if stream else [response.json()]
    assert [each["prompt_text"] for each in bodies if "prompt_text" in each] == ["user:Hi;"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_is_continued_can_be_echoed(http, stream):
    begun = {"role": "assistant", "content": "Well"}
    fields = {"messages": [*HELLO, begun], "continue_final_message": True, "temperature": 0}
    asked = CHAT | fields | {"stream": stream}

    def content(**more):
        response = http.post("/v1/chat/completions", json=asked | more)
        if not stream:
            return response.json()["choices"][0]["message"]["content"]
        events = events_of(response)
        return "".join(each["choices"][0]["delta"].get("content", "") for each in events)

    assert content(echo=True) == "Well" + content()
    assert content(echo=True, messages=HELLO, continue_final_message=False)[:4] != "Well"


def test_documents_are_refused_where_the_template_does_not_read_them(http_of_refusals):
    asked = CHAT | {"documents": [{"text": "A"}]}
    error = http_of_refusals.post("/v1/chat/completions", json=asked).json()["error"]
    assert error["param"] == "documents"
