"""OpenAI's routes before a scripted engine: what comes, in which form, and what is refused how."""

import pytest
from fake_model import expected_text, ids_of
from http_server import events_of

HELLO = [{"role": "user", "content": "Hello"}]
RENDERED = "user:Hello;"


def chat(http, **fields):
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 5, **fields}
    return http.post("/v1/chat/completions", json=body)


def complete(http, prompt="Hello", **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 5, **fields}
    return http.post("/v1/completions", json=body)


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_conversation_is_answered_with_usage(http):
    answer = chat(http).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == expected_text(RENDERED, 5)
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(RENDERED), 5)
    assert usage["total_tokens"] == len(RENDERED) + 5


def test_usage_says_how_many_drafts_were_accepted_where_there_were_any(http, engine):
    assert "completion_tokens_details" not in chat(http).json()["usage"]
    engine.drafts = 7, 3
    expected = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
    answer = chat(http).json()
    assert answer["usage"]["completion_tokens_details"] == expected
    stream = events_of(chat(http, stream=True, stream_options={"include_usage": True}))
    assert stream[-1]["usage"]["completion_tokens_details"] == expected
    body = {"prompt": ["a", "b"], "max_tokens": 2}
    completion = http.post("/v1/completions", json=body).json()
    assert completion["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 8,
    }


def test_a_stream_says_the_same_in_parts(http):
    response = chat(http, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = events_of(response)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == expected_text(RENDERED, 5)
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert len({event["id"] for event in [*events, last]}) == 1


def test_a_stream_without_usage_has_no_such_field(http):
    assert all("usage" not in event for event in events_of(chat(http, stream=True)))


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_samples_have_an_index_each(http, stream):
    prompts = ["one", "two", list(b"three")]
    response = complete(http, prompts, n=2, temperature=1, seed=7, stream=stream)
    texts = dict.fromkeys(range(6), "")
    answers = events_of(response) if stream else [response.json()]
    for answer in answers:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    for index, prompt in enumerate(prompts):
        alone = complete(http, prompt, n=2, temperature=1, seed=7).json()["choices"]
        assert [choice["text"] for choice in alone] == [texts[2 * index], texts[2 * index + 1]]


def test_a_role_of_the_api_or_that_the_template_names_is_taken(serve_text):
    http = serve_text("x", "{% for m in messages %}{% if m.role == 'ipython' %}ran {% endif %}"
                           "{{ m.role }}:{{ m.content }};{% endfor %}")  # fmt: skip
    assert chat(http, messages=[{"role": "pyth", "content": "x"}]).status_code == 400
    for role in ("system", "developer", "assistant", "tool", "function", "ipython"):
        assert chat(http, messages=[{"role": role, "content": "x"}, *HELLO]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_with_those_of_the_prompt_once(http, stream):
    asked = {"stream": stream, "return_token_ids": True}
    prompt = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    response = chat(http, **asked)
    bodies = events_of(response) if stream else [response.json()]
    assert [each["prompt_token_ids"] for each in bodies if "prompt_token_ids" in each] == [prompt]
    response = complete(http, ["Hello", "Hi"], **asked)
    bodies = events_of(response) if stream else [response.json()]
    choices = [choice for each in bodies for choice in each["choices"]]
    shown = {c["index"]: len(c["prompt_token_ids"]) for c in choices if "prompt_token_ids" in c}
    assert shown == {0: 5, 1: 2}
    assert sum(len(choice["token_ids"]) for choice in choices) == 10


def test_echo_puts_the_prompt_before_the_answer(http):
    (choice,) = complete(http, "Hello", echo=True).json()["choices"]
    assert choice["text"] == "Hello" + expected_text("Hello", 5)


def test_log_probabilities_of_a_conversation_name_the_token_and_its_bytes(http):
    answer = chat(http, logprobs=True, top_logprobs=2).json()
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)


def test_a_token_that_is_a_part_of_a_character_has_its_own_bytes(serve_text):
    http = serve_text("🎉!")
    asked = {"logprobs": True, "top_logprobs": 1}
    ours = chat(http, max_tokens=9, **asked).json()["choices"][0]["logprobs"]["content"]
    body = {"model": "fake", "messages": HELLO, "stream": False} | asked
    for entries in (ours, http.post("/api/chat", json=body).json()["logprobs"]):
        assert [each["bytes"] for each in entries] == [[240], [159], [142], [137], [33], []]
        assert entries[0]["token"] == "\N{REPLACEMENT CHARACTER}"
        assert entries[-1]["token"] == "<eos>", "it adds nothing to the text"
        assert [each["top_logprobs"][0]["bytes"] for each in entries][:2] == [[240], [159]]
    found = complete(http, logprobs=1, max_tokens=9).json()["choices"][0]["logprobs"]
    assert found["tokens"][:5] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x8e", r"bytes:\x89", "!"]
    assert list(found["top_logprobs"][1]) == [r"bytes:\x9f"]


def test_log_probabilities_of_a_completion_have_offsets(http):
    (choice,) = complete(http, logprobs=1).json()["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == list(choice["text"])
    assert found["text_offset"] == list(range(5))
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_reports_the_prompt_before_the_answer(http, stream):
    """Each sample has it."""
    answer = complete(http, "Hé!", echo=True, logprobs=1, n=2, temperature=1, stream=stream)
    parts = [answer.json()] if not stream else events_of(answer)
    for index in (0, 1):
        own = [c for part in parts for c in part["choices"] if c["index"] == index]
        assert "".join(choice["text"] for choice in own).startswith("Hé!")
        found = {
            name: [each for choice in own for each in choice["logprobs"][name]]
            for name in own[0]["logprobs"]
        }
        assert found["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6, 7], "é is two tokens"
        assert found["token_logprobs"][:4] == [None, -1, -2, -3]
        assert found["tokens"][0] == "H"
        assert found["tokens"][3] == "!"
        assert found["top_logprobs"][0] is None
        assert found["top_logprobs"][3].keys() == {"!"}
        assert "prompt_logprobs" not in own[0]


def test_echo_without_tokens_is_the_prompt_alone(http):
    """As lm-eval and others score texts."""
    answer = complete(http, ["one", "two"], echo=True, logprobs=0, max_tokens=0).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "two"]
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"] == [None, -1, -2]
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert "at least 1" in error_of(complete(http, max_tokens=0), 400)["message"]


def test_prompt_logprobs_are_by_token_id_as_vllm_has_them(http, monkeypatch):
    (choice,) = complete(http, "abc", prompt_logprobs=1).json()["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == {str(ids_of("b")[0]): {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}
    assert third[str(ids_of("c")[0])]["rank"] == 2
    assert len(chat(http, prompt_logprobs=0).json()["prompt_logprobs"]) == len(RENDERED)
    assert "stream" in error_of(complete(http, prompt_logprobs=1, stream=True), 400)["message"]
    monkeypatch.setattr("frontend.http.generation.answers._MAX_LOGPROBS", 20)
    too_many = complete(http, ["abc"] * 4, prompt_logprobs=2, max_tokens=1)
    why = error_of(too_many, 400)["message"]
    assert "24 log-probabilities or more, the limit is 20" in why


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"frobnicate": 1}, "frobnicate", "not supported"),
        ({"temperature": -1}, "temperature", ">= 0.0; it is -1"),
        ({"temperature": "hot"}, "temperature", '; it is "hot"'),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "; it is 5"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "omit one"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, None, "json and regex"),
        ({"structured_outputs": {"choice": []}, "ignore_eos": True}, None, "ignore_eos"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"store": True}, "store", "True is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"n": 2}, None, "greedy"),
        ({"logit_bias": {"5": 200}}, None, "logit_bias of token 5 is 200"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(http_of_refusals, fields, param, words):
    error = error_of(chat(http_of_refusals, **fields), 400)
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"suffix": "x"}, "suffix"), ({"best_of": 3, "temperature": 1, "stream": True}, "best_of")],
)
def test_what_completions_do_not_support_is_refused_by_name(http_of_refusals, fields, param):
    assert error_of(complete(http_of_refusals, **fields), 400)["param"] == param


def test_best_of_draws_more_samples_than_it_gives(http):
    answer = complete(http, ["A", "B"], n=2, best_of=4, temperature=1).json()
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    assert all(each["logprobs"] is None for each in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4 * 5


def test_models_are_listed_by_the_names_that_they_are_served_under(serve):
    http = serve("small", "alias/of-it")
    cards = http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["small", "alias/of-it"]
    assert http.get("/v1/models/alias/of-it").json() == cards[1]
    assert chat(http, model="small").json()["model"] == "small"
    error_of(http.get("/v1/models/other"), 404)


def test_the_document_describes_every_route(http_of_refusals):
    document = http_of_refusals.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= document["paths"].keys()
    schema = document["components"]["schemas"]["ChatCompletionRequest"]
    assert schema["additionalProperties"] == {"type": "null"}
    assert schema["properties"]["temperature"]["anyOf"][0]["minimum"] == 0


def test_a_conversation_that_cannot_be_read_is_refused_before_its_template(http_of_refusals):
    http = http_of_refusals
    error = error_of(chat(http, messages=[{"role": "user", "content": "a" * 2_100_000}]), 400)
    assert "the conversation is too long: it has 2100000 characters" in error["message"]
    assert error["code"] == "context_length_exceeded"
    error = error_of(chat(http, chat_template_kwargs={"x": "a" * 2_100_000}), 400)
    assert "the conversation is too long: it has 21000" in error["message"]


@pytest.mark.parametrize("add_special_tokens", [None, False])
def test_long_prompts_of_a_list_are_read_and_answered_in_order(http, add_special_tokens):
    prompts = ["ab" * 30, "c" * 5, [5, 6]]
    fields = {"add_special_tokens": add_special_tokens, "return_token_ids": True}
    choices = complete(http, prompts, **fields).json()["choices"]
    assert [each["prompt_token_ids"] for each in choices] == [
        ids_of(prompts[0]), ids_of(prompts[1]), [5, 6],
    ]  # fmt: skip


def test_the_prompt_of_a_list_that_is_too_long_is_named(http_of_refusals):
    error = error_of(complete(http_of_refusals, ["a", "a" * 9000]), 400)
    assert error["message"].startswith("prompt 1 ")
    assert error["code"] == "context_length_exceeded"


def test_a_suffix_is_what_stands_behind_the_gap(serve):
    """Of each prompt and sample, streamed too."""
    http = serve(more_tokens=("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"))
    for prompt, more in (("a", {}), (["a", "c"], {"n": 2, "temperature": 1, "stream": True})):
        answer = complete(http, prompt, suffix="b", **more)
        assert answer.status_code == 200, answer.text
    texts = [request.prompt_token_ids for request in http.engine.requests]
    a, b, c = (ids_of(each) for each in "abc")
    assert texts[0] == [257, *a, 258, *b, 259]
    assert sorted(texts[1:]) == sorted([texts[0], [257, *c, 258, *b, 259]])
    assert {choice["index"] for event in events_of(answer) for choice in event["choices"]} == {
        *range(4)
    }
    assert {each.sampling_params.stop_token_ids for each in http.engine.requests} == {
        (257, 258, 259, 260)
    }
    complete(http, "a", suffix="")
    assert http.engine.requests[-1].prompt_token_ids == a
    for fields, why in (({"prompt": [1, 2]}, "send no token ids"), ({"echo": True}, "omit them")):
        assert (
            why
            in error_of(complete(http, **{"prompt": "a", "suffix": "b", **fields}), 400)["message"]
        )
