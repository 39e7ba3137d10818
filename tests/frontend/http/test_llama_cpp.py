"""Routes of llama.cpp's server before a scripted engine. Fields, prompts and greedy answers were
compared with llama-server's on the same requests."""

import json

import httpx
import pytest
from fake_engine import wait_until
from fake_model import EOS_ID, expected_text, ids_of, saying
from msgspec.structs import replace

from protocol.calls import RequestInfos

FIM = ("<PRE>", "<SUF>", "<MID>", "<EOT>", "<REPO>")
PRE, SUF, MID, EOT, REPO = range(257, 262)
VECTORS = {"tasks": ("embed", "token_embed")}


def posted(http, path="/completion", **body):
    answer = http.post(path, json={"temperature": 0, "n_predict": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http, **body):
    answer = http.post("/completion", json={"temperature": 0, "stream": True, **body})
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def test_an_answer_has_its_fields(http):
    answer = posted(http, prompt="Hello", return_tokens=True, id_slot=3)
    text = expected_text("Hello", 4)
    settings, timings = answer.pop("generation_settings"), answer.pop("timings")
    assert answer == {
        "index": 0, "content": text, "tokens": ids_of(text), "id_slot": 3, "stop": True,
        "tokens_predicted": 4, "tokens_evaluated": 5, "model": "fake", "prompt": "Hello",
        "has_new_line": False, "truncated": False, "stop_type": "limit", "stopping_word": "",
        "tokens_cached": 8,
    }  # fmt: skip
    assert (settings["n_predict"], settings["top_k"], settings["seed"]) == (4, 7, 2**32 - 1)
    names = ("n", "ms", "per_token_ms", "per_second")
    assert timings.keys() == {"cache_n"} | {
        f"{part}_{name}" for part in ("prompt", "predicted") for name in names
    }
    assert posted(http, "/completions", prompt="Hello")["tokens"] == []
    fields = ["content", "timings/predicted_n", "generation_settings/nope", "nope/x"]
    chosen = posted(http, prompt="Hello", response_fields=fields)
    assert chosen == {"content": text, "timings/predicted_n": 4}


@pytest.mark.parametrize(
    ("says", "stop", "content", "kind", "word"),
    [("one two", ["two"], "one ", "word", "two"), ("one", None, "one", "eos", "")],
)
def test_why_an_answer_ends(serve, says, stop, content, kind, word):
    http = serve(next_token=saying(says, then_eos=True))
    whole = posted(http, prompt="x", n_predict=-1, stop=stop)
    *parts, last = events(http, prompt="x", stop=stop)
    for answer in (whole, last):
        assert (answer["stop_type"], answer["stopping_word"]) == (kind, word)
    assert whole["content"] == "".join(part["content"] for part in parts) == content
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    assert not any(part["stop"] or "model" in part for part in parts)
    assert [part["tokens_predicted"] for part in parts] == sorted(
        part["tokens_predicted"] for part in parts
    )


def test_prompts_are_texts_tokens_and_both(http, engine):
    prompt = ["ab", [5, 6], [7, "a", 8], {"prompt_string": "b"}]
    found = posted(http, prompt=prompt, n_cmpl=2, temperature=1, seed=3)
    a, b = ids_of("a"), ids_of("b")
    asked = [each.prompt_token_ids for each in engine.requests]
    assert asked == [[*a, *b], [5, 6], [7, *a, 8], b]
    assert [each["index"] for each in found] == list(range(8))
    assert found[0]["content"] != found[1]["content"]
    posted(http, prompt=[7, "a", 8])
    assert engine.requests[-1].prompt_token_ids == [7, *a, 8]


def test_probabilities_are_those_of_the_model(http):
    whole = posted(http, prompt="Hello", n_probs=2, n_predict=2)["completion_probabilities"]
    parts = events(http, prompt="Hello", n_probs=2, n_predict=2)[:-1]
    assert [each for part in parts for each in part["completion_probabilities"]] == whole
    first, text = whole[0], expected_text("Hello", 1)
    same = {"token": text, "bytes": [*text.encode()], "logprob": -0.5, "id": ids_of(text)[0]}
    assert {name: first[name] for name in same} == same
    assert [each["logprob"] for each in first["top_logprobs"]] == [-0.5, -1.0]


def test_parameters_reach_the_engine(http, engine):
    bias = [[5, 1.5], ["ab", False]]
    posted(http, prompt="x", repeat_penalty=1.5, repeat_last_n=-1, logit_bias=bias, n_predict=-1)
    asked = engine.requests[-1].sampling_params
    a, b = ids_of("ab")
    assert (asked.repetition_penalty, asked.max_tokens) == (1.5, 511)
    assert asked.logit_bias == {5: 1.5, a: -100.0, b: -100.0}
    posted(http, prompt="x", temperature=-1, logit_bias={"5": 1, "a": False}, seed=-1, top_k=-1)
    asked = engine.requests[-1].sampling_params
    assert (asked.logit_bias, asked.temperature, asked.top_k) == ({5: 1, a: -100.0}, 0, 0)
    for samplers in (["top_k", "infill"], "ki"):
        posted(http, prompt="x", temperature=0.5, samplers=samplers, repeat_penalty=2)
        asked = engine.requests[-1].sampling_params
        found = (asked.top_k, asked.top_p, asked.min_p, asked.temperature, asked.repetition_penalty)
        assert found == (7, 1, 0.2, 1, 1), "others are off"
        assert asked.chain.samplers == ("top_k", "min_p")
    posted(http, prompt="x", temperature=0.5, typical_p=0.5, xtc_probability=0.1, repeat_penalty=2)
    chain = engine.requests[-1].sampling_params.chain
    assert (chain.typical_p, chain.xtc_probability, chain.repeat_last_n) == (0.5, 0.1, 64)
    assert chain.samplers[-1] == "temperature", "llama.cpp's order"
    posted(http, prompt="x", grammar='root ::= "a"')
    assert engine.requests[-1].sampling_params.structured_output.kind == "grammar"
    posted(http, prompt="x", json_schema={"properties": {"a": {}}})
    text = json.loads(engine.requests[-1].sampling_params.structured_output.text)
    assert text == {"properties": {"a": {}}, "additionalProperties": False}
    assert len({each.cache_salt for each in engine.requests}) == 1
    posted(http, prompt="x", cache_prompt=False)
    assert engine.requests[-1].cache_salt


def test_defaults_are_llama_cpps_where_the_model_recommends_nothing(serve):
    http = serve(recommends=False)
    http.post("/completion", json={"prompt": "x", "n_predict": 1})
    asked = http.engine.requests[-1].sampling_params
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p) == (0.8, 40, 0.95, 0.05)


def test_a_prompt_is_only_cached_where_no_tokens_are_asked_for(http, engine):
    answer = posted(http, prompt="Hello", n_predict=0, return_tokens=True)
    assert (answer["content"], answer["tokens"], answer["stop_type"]) == ("", [], "limit")
    assert answer["generation_settings"]["n_predict"] == 0
    assert engine.requests[-1].sampling_params.max_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_lines_end_an_answer(serve, stream):
    def content(**body):
        if not stream:
            return posted(http, prompt="x", n_predict=100, **body)["content"]
        return "".join(each["content"] for each in events(http, prompt="x", n_predict=100, **body))

    says = "a\n    b\n  c\nd\n"
    http = serve(next_token=saying(says), step_s=0.002)
    assert content(n_indent=2) == "a\n    b\n  c\n"
    assert content(n_indent=4) == "a\n    b\n  "
    assert content(t_max_predict_ms=1) in (says[:2], says[:8], says[:12])
    assert content(t_max_predict_ms=60_000) == (says * 9)[:100]
    assert len(http.engine.aborted) == 3


def test_a_reader_that_leaves_ends_its_requests(serve):
    http = serve(step_s=0.02)
    body = {"prompt": ["a", "b"], "stream": True}
    with http.stream("POST", "/completion", json=body) as response:
        chunks = response.iter_raw()  # closes the response when it is dropped
        next(chunks)
        assert http.engine.num_live == 2
    wait_until(lambda: len(http.engine.aborted) == 2)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/completion", json=body | {"stream": False}, timeout=0.2)
    wait_until(lambda: len(http.engine.aborted) == 4)


def test_a_failure_is_a_status(serve):
    http = serve(fail=lambda _request, number: "no token is possible" if number == 1 else None)
    answer = http.post("/completion", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "no token is possible")
    assert (
        "no token is possible"
        in http.post("/completion", json={"prompt": "x", "stream": True}).text
    )


FILES = [{"text": "x", "filename": "f"}, {"text": "<MID>"}]


def test_a_gap_is_filled_beside_other_files(serve):
    http = serve(more_tokens=FIM, model_fields={"max_model_len": 4096})
    posted(http, "/infill", input_prefix="a", input_suffix="b", input_extra=FILES, prompt="c")
    asked = http.engine.requests[-1]
    extra = "myproject\n\n\n--- snippet ---\n\nx\n\n--- snippet ---\n\n<MID>"
    around = [PRE, *ids_of("ac"), SUF, *ids_of("b"), MID]
    assert asked.prompt_token_ids == [REPO, *ids_of(extra), *around]
    assert asked.sampling_params.stop_token_ids == (PRE, SUF, MID, REPO, EOT)
    http.engine.next_token = lambda _request, number: [ids_of("y")[0], EOT][number]
    assert posted(http, "/infill", input_prefix="a", input_suffix="b")["stop_type"] == "eos"


def test_a_long_prompt_of_a_gap_is_cut_around_it(serve):
    """Three quarters of what an answer leaves are before it."""
    http = serve(more_tokens=FIM)
    long = {"input_prefix": "a" * 999 + "b", "input_suffix": "c" + "d" * 999, "n_predict": 100}
    posted(http, "/infill", **long, input_extra=FILES * 40)
    ids, batch = http.engine.requests[-1].prompt_token_ids, 512 - 100 - 8
    around = "a" * (3 * batch // 4 - 1) + "b", "c" + "d" * (batch // 4 - 3)
    assert ids == [PRE, *ids_of(around[0]), SUF, *ids_of(around[1]), MID]


def test_other_files_have_what_a_batch_and_two_answers_leave(serve):
    http = serve(more_tokens=FIM, model_fields={"max_model_len": 4096})
    posted(http, "/infill", input_prefix="a", input_suffix="b", input_extra=FILES * 99, n_predict=9)
    *extra, pre, _, _, _, _ = http.engine.requests[-1].prompt_token_ids
    assert (pre, len(extra)) == (PRE, 4096 - 2048 - 2 * 9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "x", "mirostat": 2}, "mirostat"),
        ({"prompt": "x", "xtc_probability": 2}, "xtc_probability"),
        ({"prompt": "x", "post_sampling_probs": True}, "post_sampling_probs"),
        ({"prompt": "x", "samplers": ["tfs"]}, "samplers holds 'tfs'"),
        ({"prompt": "x", "logit_bias": [[1]]}, "give [token, bias]"),
        ({"prompt": "x", "grammar": "root ::= x", "json_schema": {}}, "omit one"),
        ({"prompt": [[1, None]]}, "a prompt holds None"),
        ({"prompt": []}, "there are 0 prompts"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "multimodal_data"),
        ({"prompt": "x" * 600}, "limit is 511"),
        ({"prompt": "x", "colour": 1}, "colour"),
    ],
)
def test_what_is_not_done_is_refused_by_name(http_of_refusals, fields, words):
    response = http_of_refusals.post("/completion", json=fields)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_model_without_tokens_for_it_fills_no_gap(http_of_refusals):
    response = http_of_refusals.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 400
    assert "'fake' has no tokens for filling in" in response.json()["error"]["message"]


def test_texts_are_tokens_with_pieces_and_without(serve):
    http = serve(more_tokens=FIM)
    tokens = ids_of("Hé")
    assert asked(http, "/tokenize", content="Hé<eos>") == {"tokens": [*tokens, EOS_ID]}
    mixed = asked(http, "/tokenize", content=["H", 5], with_pieces=True, add_special=True)
    assert mixed == {"tokens": [{"id": tokens[0], "piece": "H"}, {"id": 5, "piece": "&"}]}
    plain = asked(http, "/tokenize", content="<eos><MID>", parse_special=False)["tokens"]
    assert plain == [each for part in "<eos><MID>" for each in ids_of(part)]
    piece = asked(http, "/tokenize", content="é", with_pieces=True)["tokens"][0]
    assert piece == {"id": tokens[1], "piece": [0xC3]}
    assert asked(http, "/detokenize", tokens=tokens)["content"] == "Hé"


def asked(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_conversation_becomes_its_prompt(http):
    messages = [{"role": "user", "content": "Hi"}]
    assert asked(http, "/apply-template", messages=messages) == {"prompt": "user:Hi;"}
    assert http.post("/apply-template", json={}).status_code == 400


def test_vectors_by_either_name(serve):
    http = serve(model_fields=VECTORS)
    for path, body in (("/embedding", {"content": "ab"}), ("/embeddings", {"input": ["ab", "c"]})):
        found = asked(http, path, **body, embd_normalize=2)
        assert [each["index"] for each in found] == list(range(len(found)))
        assert found[0]["embedding"][0][0] == 2.0
    assert http.post("/embedding", json={"content": "a", "embd_normalize": 0}).status_code == 400


def test_props_describe_the_model(serve):
    http = serve("small")
    props = http.get("/props").json()
    assert http.get("/props?model=other").status_code == 404
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 512
    assert (settings["params"]["temperature"], settings["params"]["n_predict"]) == (0.25, -1)
    assert (props["model_alias"], props["model_path"]) == ("small", "fake")
    assert props["modalities"] == {"vision": False, "audio": False, "video": False}
    assert (props["total_slots"], props["is_sleeping"]) == (64, False)
    assert "m.role" in props["chat_template"]
    assert http.get("/lora-adapters").json() == []
    for path, words in (("/props", "options of its daemon"), ("/slots/0", "--slot-save-path DIR")):
        response = http.post(f"{path}?action=save", json={"filename": "x"})
        assert response.status_code == 501
        assert words in response.json()["error"]["message"]
    for path, same in (("/v1/health", "/health"), ("/models", "/v1/models")):
        assert http.get(path).json() == http.get(same).json()


def test_a_slot_is_in_use_while_a_request_runs(serve):
    http = serve(step_s=0.02, max_num_seqs=1)
    body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    for path in ("/slots", "/slots?fail_on_no_slot=1"):
        assert [slot["is_processing"] for slot in http.get(path).json()] == [False]
    with http.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.iter_raw()
        next(chunks)
        (slot,) = http.get("/slots").json()
        assert slot.keys() == {"id", "n_ctx", "speculative", "is_processing"}
        answer = http.engine.answer
        http.engine.answer = lambda call: with_status(answer(call), "running")
        (slot,) = http.get("/slots").json()
        assert slot["is_processing"]
        assert (slot["n_prompt_tokens"], slot["n_prompt_tokens_cache"]) == (5, 32)
        assert slot["next_token"][0]["n_decoded"] + slot["next_token"][0]["n_remain"] == 400
        assert http.get(path).status_code == 503


def with_status(answer, status):
    """What an engine says of its requests, as if they had this status."""
    if not isinstance(answer.result, RequestInfos):
        return answer
    infos = [replace(each, status=status) for each in answer.result.requests]
    return replace(answer, result=replace(answer.result, requests=infos))
