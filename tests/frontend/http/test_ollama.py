"""Ollama's routes before a scripted engine."""

import json
import time
from datetime import datetime

import httpx
import pytest
from fake_model import TOKENIZER, expected_text, ids_of
from http_server import serving

HELLO = [{"role": "user", "content": "Hello"}]
RENDERED = "user:Hello;"
GREEDY = {"temperature": 0, "num_predict": 5}


def chat(http, options=GREEDY, **fields):
    body = {"model": "fake", "messages": HELLO, "options": options, **fields}
    return http.post("/api/chat", json=body)


def generate(http, options=GREEDY, **fields):
    body = {"model": "fake", "prompt": "Hello", "options": options, **fields}
    return http.post("/api/generate", json=body)


def lines_of(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    return body["error"]


def prompt_of(request):
    return TOKENIZER.decode(request.prompt_token_ids)


def test_a_conversation_is_a_stream_unless_said_otherwise(http):
    *parts, last = lines_of(chat(http))
    assert all(part["done"] is False for part in parts)
    assert {part["message"]["role"] for part in parts} == {"assistant"}
    text = "".join(part["message"]["content"] for part in parts)
    assert text == expected_text(RENDERED, 5)
    assert last["message"]["content"] == ""
    assert (last["done"], last["done_reason"]) == (True, "length")
    whole = chat(http, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": text}
    assert whole.keys() == last.keys()


def test_a_prompt_goes_through_the_template_unless_it_is_raw(http, engine):
    *parts, last = lines_of(generate(http))
    assert "".join(part["response"] for part in parts) == expected_text(RENDERED, 5)
    assert last["response"] == ""
    generate(http, system="Be brief")
    generate(http, template="<{{ messages[0].content }}>")
    whole = generate(http, raw=True, stream=False).json()
    assert whole["response"] == expected_text("Hello", 5)
    assert "context" not in whole
    assert [prompt_of(request) for request in engine.requests] == [
        RENDERED,
        "system:Be brief;" + RENDERED,
        "<Hello>",
        "Hello",
    ]


def test_the_context_of_an_answer_goes_before_the_next_prompt(http, engine):
    context = generate(http, stream=False).json()["context"]
    assert TOKENIZER.decode(context) == RENDERED + expected_text(RENDERED, 5)
    assert lines_of(generate(http))[-1]["context"] == context
    generate(http, context=context)
    assert prompt_of(engine.requests[-1]) == TOKENIZER.decode(context) + RENDERED


def test_figures_are_those_of_the_engine_in_nanoseconds(http):
    for answer in (lines_of(chat(http))[-1], generate(http, stream=False).json()):
        assert answer["prompt_eval_count"] == len(RENDERED)
        assert answer["eval_count"] == 5
        assert answer["prompt_eval_duration"] == answer["eval_duration"] == 100_000_000
        assert 0 < answer["load_duration"] < answer["total_duration"] < 20e9
        assert abs(datetime.fromisoformat(answer["created_at"]).timestamp() - time.time()) < 60


def test_options_reach_the_engine(http, engine):
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 5, "num_predict": 7,
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
    }  # fmt: skip
    chat(http, options)
    params = engine.requests[-1].sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 3, 0.1)
    assert (params.seed, params.max_tokens) == (5, 7)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, 0.5)
    assert params.frequency_penalty == 0.25


@pytest.mark.parametrize(("num_predict", "length"), [(None, 501), (-1, 501), (-2, 501), (3, 3)])
def test_as_much_is_said_as_asked_or_as_there_is_room_for(http, num_predict, length):
    options = {"num_predict": num_predict, "temperature": 0}
    assert chat(http, options, stream=False).json()["eval_count"] == length


def test_a_context_length_limits_prompt_and_answer(http):
    answer = chat(http, {"num_ctx": 20, "temperature": 0}, stream=False).json()
    assert answer["eval_count"] == 20 - len(RENDERED)
    assert "num_ctx is 11" in error_of(chat(http, {"num_ctx": 11}, truncate=False), 400)
    answer = chat(http, {"num_ctx": 4096, "temperature": 0}, stream=False).json()
    assert answer["eval_count"] == answer["num_ctx"] - len(RENDERED) == 512 - len(RENDERED)


def test_a_chat_that_is_too_long_loses_its_oldest_messages(http, engine):
    turns = [{"role": "user", "content": f"q{n}"} for n in range(200)]
    answers = [{"role": "assistant", "content": f"a{n}"} for n in range(200)]
    rest = [each for turn in zip(turns, answers, strict=True) for each in turn]
    said = [{"role": "system", "content": "Be brief."}, *rest, *HELLO]
    for options in ({"num_ctx": 100, "num_predict": 5}, {"num_predict": 5}):  # 512: the engine's
        most = options.get("num_ctx", 512)
        last = lines_of(chat(http, options, messages=said))[-1]
        prompt = prompt_of(engine.requests[-1])
        assert last["truncated_messages"] == len(said) - prompt.count(";")
        head, _, tail = prompt.partition(";user:")
        assert head == "system:Be brief."
        assert tail.endswith("a199;" + RENDERED)
        assert most - 5 - len("user:q99;assistant:a99;") < len(prompt) + 5 <= most
    assert "the input length exceeds the context length" in error_of(
        chat(http, {"num_ctx": 100}, messages=said, truncate=False), 400
    )
    rounds = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}] * 50
    chat(http, {"num_ctx": 100, "num_predict": 5}, messages=[*said[:1], *HELLO, *rounds])
    start, *rest = prompt_of(engine.requests[-1]).split("assistant:a;tool:t;")
    assert (start, {*rest}, len(rest)) == ("system:Be brief.;" + RENDERED, {""}, 3)


def test_a_prompt_that_is_too_long_keeps_its_start_and_its_end(http, engine):
    text = "".join(chr(97 + n % 26) for n in range(1000))
    for options, most in (({"num_ctx": 40}, 30), ({}, 512 - 128)):
        generate(http, {"num_predict": 200} | options, prompt=text, raw=True)
        assert prompt_of(engine.requests[-1]) == text[:4] + text[4 - most :]
    generate(http, {"num_keep": 9, "num_ctx": 40.0}, prompt=text, raw=True)
    assert prompt_of(engine.requests[-1]) == text[:9] + text[-21:]
    error_of(generate(http, prompt=text, raw=True, truncate=False), 400)
    chat(http, {"num_ctx": 40}, messages=[{"role": "user", "content": text}])
    assert len(engine.requests[-1].prompt_token_ids) == 30, "the last message alone is too long"


def test_options_with_whole_numbers_may_come_as_fractions_of_none(http, engine):
    """As encoders write them that know one kind of number."""
    options = {
        "num_ctx": 100.0, "num_predict": 3.0, "seed": 5.0, "top_k": 3.0, "repeat_last_n": -1.0,
        "mirostat": 0.0, "num_gpu": 99.0, "num_keep": 4.0, "top_p": 0, "temperature": 1,
    }  # fmt: skip
    assert chat(http, options, stream=False).json()["eval_count"] == 3
    params = engine.requests[-1].sampling_params
    assert (params.seed, params.top_k, params.top_p, params.max_tokens) == (5, 3, 0, 3)
    for wrong in ({"seed": 5.5}, {"num_ctx": 0.0}, {"repeat_last_n": -0.5}, {"num_predict": 2.5}):
        error_of(chat(http, wrong), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_where_the_context_is_full_or_goes_on_without_its_oldest_half(http, stream):
    options = {"num_ctx": 40, "num_predict": 60, "num_keep": 6, "temperature": 0}
    kept, expected, num_dropped = RENDERED, "", 0
    while len(expected) < 60:
        more = expected_text(kept, min(40 - len(kept), 60 - len(expected)))
        kept, expected = kept + more, expected + more
        if len(kept) == 40:
            kept, num_dropped = kept[:6] + kept[6 + 17 :], num_dropped + 17
    for fields, text in (
        ({"shift": True}, expected),
        ({"shift": False}, expected[:29]),
        ({}, expected[:29]),
        ({"shift": True, "format": "json"}, expected[:29]),  # a grammar cannot go on
    ):
        response = chat(http, options, stream=stream, **fields)
        answers = lines_of(response) if stream else [response.json()]
        assert "".join(each["message"]["content"] for each in answers) == text
        last = answers[-1]
        assert (last["done_reason"], last["eval_count"]) == ("length", len(text))
        assert last.get("truncated_tokens") == (num_dropped if len(text) == 60 else None)
    assert chat(http, {"num_ctx": 20}, shift=True, stream=False).json()["eval_count"] == 200


def test_a_template_without_tools_takes_none(http):
    tool = {"type": "function", "function": {"name": "f"}}
    assert '"fake" does not support tools' in error_of(chat(http, tools=[tool]), 400)


def test_an_answer_goes_on_between_two_characters(serve_text):
    options = {"num_ctx": 30, "num_predict": 90}
    for size in range(3):
        answers = lines_of(chat(serve_text("a" * size + "日本語" * 20), options, shift=True))
        text = "".join(each["message"]["content"] for each in answers)
        assert "\ufffd" not in text.removesuffix("\ufffd")
        assert len(text) > 20, "more than one context"


def test_a_model_that_recommends_nothing_is_sampled_as_ollama_does(serve):
    http = serve(recommends=False)
    chat(http, {"num_predict": 2})
    assert http.engine.requests[-1].sampling_params.temperature == 0.8


@pytest.mark.parametrize("stop", ["wor", ["wor"]])
def test_a_stop_string_ends_the_answer(serve_text, stop):
    answer = chat(serve_text("hello world"), {"stop": stop}, stream=False).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("hello ", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_name_the_tokens(http, stream):
    response = chat(http, logprobs=True, top_logprobs=2, stream=stream)
    answers = lines_of(response) if stream else [response.json()]
    entries = [entry for answer in answers for entry in answer.get("logprobs", [])]
    assert "".join(entry["token"] for entry in entries) == expected_text(RENDERED, 5)
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_prompt_the_model_is_only_loaded(http, engine, stream):
    for response in (
        chat(http, messages=[], stream=stream),
        generate(http, prompt="", stream=stream),
    ):
        (answer,) = lines_of(response) if stream else [response.json()]
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert not engine.requests


def test_what_clients_send_for_nothing_is_nothing(serve_text):
    http = serve_text("Hi")
    nothing = {"format": "", "keep_alive": "5m", "think": None}
    assert chat(http, {}, **nothing, tools=[]).status_code == 200
    unused = {"system": "", "template": "", "suffix": "", "images": None, "context": []}
    assert generate(http, None, **unused, format=None, keep_alive=-1).status_code == 200


def test_a_suffix_is_what_stands_behind_the_gap(serve):
    http = serve(more_tokens=("<PRE>", "<SUF>", "<MID>", "<EOT>"))
    answer = generate(http, {"num_predict": 3}, prompt="a", suffix="b", stream=False)
    assert answer.json()["prompt_eval_count"] == 5
    (request,) = http.engine.requests
    assert request.prompt_token_ids == [257, *ids_of("a"), 258, *ids_of("b"), 259]
    assert 260 in request.sampling_params.stop_token_ids
    shown = http.post("/api/show", json={"model": "fake"}).json()
    assert shown["capabilities"] == ["completion", "insert"]


def test_options_of_loading_change_no_answer(http):
    loading = {"num_gpu": 99, "main_gpu": 0, "num_thread": 8, "num_batch": 512, "num_keep": 4}
    loading |= {"use_mmap": True, "use_mlock": False, "low_vram": False, "numa": False}
    sampling = {"temperature": 0, "num_predict": 5, "mirostat_eta": 0.1, "tfs_z": 1}
    with_them = chat(http, {**sampling, **loading}, stream=False).json()["message"]
    assert with_them == chat(http, sampling, stream=False).json()["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"frobnicate": 1}, "'frobnicate'"),
        ({"options": {"frobnicate": 1}}, "'options.frobnicate'"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"format": "xml"}, "format is 'xml'"),
        ({"think": True}, '"fake" does not support thinking'),
        ({"keep_alive": 0}, "keep_alive is '0'"),
        ({"keep_alive": "0s"}, "keep_alive is '0'"),
        ({"keep_alive": "soon"}, "keep_alive is 'soon'"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"model": ""}, "model"),
    ],
)
@pytest.mark.parametrize("call", [chat, generate])
def test_what_cannot_be_served_is_refused_by_name(http_of_refusals, call, fields, words):
    assert words in error_of(call(http_of_refusals, **fields), 400)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"template": "{{ .Prompt }}"}, "one of Go's"),
        ({"template": "x" * 300_000}, "template has 300000 characters, the limit is"),
        ({"suffix": "end"}, "'fake' has no tokens for filling in; omit suffix"),
        ({"suffix": "end", "raw": True}, "suffix goes without raw"),
        ({"images": ["aGk="]}, "images"),
        ({"raw": True, "system": "x"}, "raw"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused_by_name(http_of_refusals, fields, words):
    assert words in error_of(generate(http_of_refusals, **fields), 400)


def test_what_a_conversation_cannot_have_is_refused_by_name(http_of_refusals):
    http = http_of_refusals
    images = [{"role": "user", "content": "x", "images": ["aGk="]}]
    assert "images" in error_of(chat(http, messages=images), 400)
    assert "tools" in error_of(chat(http, tools=[{"type": "function"}]), 400)


@pytest.mark.parametrize("names", [(), ("small",), ("small:latest",), ("small:1b", "other")])
def test_models_go_by_their_names_with_a_tag_or_without(serve, names):
    http = serve(*names)
    models = http.get("/api/tags").json()["models"]
    tagged = [name if ":" in name else f"{name}:latest" for name in names or ("fake",)]
    assert [model["model"] for model in models] == tagged
    assert [model["name"] for model in http.get("/api/ps").json()["models"]] == tagged
    for path in ("/api/tags", "/api/ps"):
        for model in http.get(path).json()["models"]:
            details = model["details"]
            assert (model["size"], details["format"]) == (98_000_000, "gguf")
            assert (details["parameter_size"], details["quantization_level"]) == (
                "134.52M", "Q4_1",
            )  # fmt: skip
    short = {name.removesuffix(":latest") for name in tagged}
    for name in {*tagged, *short, min(short).upper()}:
        assert chat(http, model=name, stream=False).json()["model"] == name
        shown = http.post("/api/show", json={"model": name}).json()
        assert shown["model_info"][shown["details"]["family"] + ".context_length"] == 512
        assert shown["capabilities"] == ["completion"]
        lines = lines_of(http.post("/api/pull", json={"model": name}))
        assert lines[-1] == {"status": "success"}
    for path in ("chat", "generate", "show", "pull"):
        error = error_of(http.post(f"/api/{path}", json={"model": "llama9"}), 404)
        assert error.startswith("model 'llama9' not found; this server has ")


def test_a_vocabulary_is_shown_if_it_is_asked_for(http):
    for verbose in (False, True):
        info = http.post("/api/show", json={"model": "fake", "verbose": verbose}).json()[
            "model_info"
        ]
        tokens, types = info["tokenizer.ggml.tokens"], info["tokenizer.ggml.token_type"]
        if not verbose:
            assert tokens is types is None
            continue
        assert (len(tokens), {*types[:-1]}, types[-1]) == (info["fake.vocab_size"], {1}, 3)
        assert tokens[info["tokenizer.ggml.eos_token_id"]] == "<eos>"


def test_models_of_an_engine_that_is_away_are_listed_and_not_loaded(address, serve):
    with serving(address, "small") as url, httpx.Client(base_url=url, timeout=20) as http:
        (entry,) = http.get("/api/tags").json()["models"]
        assert entry["name"] == "small:latest"
        assert http.get("/api/ps").json() == {"models": []}
        error_of(chat(http, model="small"), 503)
        (running,) = serve("small").get("/api/tags").json()["models"]
        assert entry["digest"] == running["digest"]


def test_the_server_says_what_it_is(http):
    assert http.head("/").status_code == 200
    assert http.get("/").text == "Ollama is running"
    page = http.get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert http.head("/api/version").status_code == 200
    assert http.get("/api/version").json()["version"].count(".") == 2
