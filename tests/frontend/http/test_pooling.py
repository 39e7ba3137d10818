"""Vectors, classes, scores and rankings over HTTP, by each API's shape. What the scripted engine
answers stands in tests/frontend/fake_model.py."""

import base64
import struct

import httpx
import pytest
from fake_engine import FakeEngine
from fake_model import byte_tokenizer
from http_server import TEMPLATE, serving

VECTORS = {"tasks": ("embed", "token_embed"), "prompts": {"query": "Q: ", "passage": "P: "}}
LABELS = {"tasks": ("classify", "token_classify", "score"), "labels": ("no", "yes")}


def ids_of(text):
    return byte_tokenizer().encode(text).ids


A, B = ids_of("a")[0], ids_of("b")[0]


def posted(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"] if isinstance(error, dict) else error


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("ab", [2]), (["ab", "c"], [2, 1]), ([5, 6, 7], [3]), ([[5, 6], [7]], [2, 1])],
)
def test_openais_inputs_and_both_encodings(serve, given, lengths):
    http = serve(model_fields=VECTORS)
    body = posted(http, "/v1/embeddings", input=given, model="fake", user="u")
    assert [each["embedding"][0] for each in body["data"]] == lengths
    assert [each["index"] for each in body["data"]] == list(range(len(lengths)))
    total = sum(lengths)
    assert body["usage"] == {
        "prompt_tokens": total, "completion_tokens": 0, "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": len(lengths)},
    }  # fmt: skip
    packed = posted(http, "/v1/embeddings", input=given, encoding_format="base64")["data"]
    for each, same in zip(body["data"], packed, strict=True):
        assert [*struct.unpack("<4f", base64.b64decode(same["embedding"]))] == each["embedding"]
    assert http.engine.requests[0].tenant.endswith("/u")


def test_messages_pass_the_chat_template(serve):
    http = serve(model_fields=VECTORS, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    posted(http, "/v1/embeddings", messages=messages)
    asked = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})
    assert http.engine.requests[0].prompt_token_ids == asked.json()["tokens"]
    both = {"input": "a", "messages": messages}
    assert "give input or messages" in refusal(http, "/v1/embeddings", **both)


def test_the_models_prompts_by_name_and_by_input_type(serve):
    http = serve(model_fields=VECTORS)
    for more in ({"prompt_name": "query"}, {"input_type": "query"}, {"input_type": "document"}, {}):
        posted(http, "/v1/embeddings", input="a", **more)
    texts = ["Q: a", "Q: a", "P: a", "a"]
    assert [each.prompt_token_ids for each in http.engine.requests] == [ids_of(t) for t in texts]
    assert "this model has query, passage" in refusal(
        http, "/v1/embeddings", input="a", prompt_name="x"
    )


def test_pooling_has_a_row_a_token(serve):
    http = serve(model_fields=VECTORS)
    body = posted(http, "/pooling", input="ab", task="token_embed", truncate_prompt_tokens=1)
    assert body["data"] == [{"object": "pooling", "index": 0, "data": [[A, 1]]}]
    assert posted(http, "/pooling", input="ab")["data"][0]["data"] == [2, A, B, 0.5]


def test_classes_have_names(serve):
    http = serve(model_fields=LABELS)
    data = posted(http, "/classify", input=["a", "b"])["data"]
    found = {"label": "yes", "probs": [0.25, 0.75], "num_classes": 2}
    assert data == [{"index": 0, **found}, {"index": 1, **found}]


def test_scores_of_pairs(serve):
    http = serve(model_fields=LABELS)
    for path, one, other in (("/score", "text_1", "text_2"), ("/v1/score", "queries", "documents")):
        body = posted(http, path, **{one: "a", other: ["bcd", "b"]})
        assert [each["score"] for each in body["data"]] == [4 / 64, 2 / 64]
        assert body["usage"]["prompt_tokens"] == 6


def test_rankings_are_best_first(serve):
    http = serve(model_fields=LABELS)
    documents = ["b", {"text": "bcde"}, "bc"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = posted(http, path, query="a", documents=documents, top_n=2, model="fake")
        assert body["results"] == [
            {"index": 1, "document": {"text": "bcde"}, "relevance_score": 5 / 64},
            {"index": 2, "document": {"text": "bc"}, "relevance_score": 3 / 64},
        ]
    body = posted(http, path, query="a", documents=documents, return_documents=False)
    assert [each["index"] for each in body["results"]] == [1, 2, 0]
    assert "document" not in body["results"][0]


def test_coheres_embeddings_by_type(serve):
    http = serve(model_fields=VECTORS)
    asked = {"model": "fake", "texts": ["a"], "input_type": "search_query"}
    body = posted(http, "/v2/embed", **asked, embedding_types=["float", "base64"])
    number = len(ids_of("Q: a"))
    assert body["embeddings"]["float"][0][0] == number
    packed = base64.b64decode(body["embeddings"]["base64"][0])
    assert [*struct.unpack("<4f", packed)] == body["embeddings"]["float"][0]
    assert body["meta"]["billed_units"] == {"input_tokens": number}
    contents = [{"content": [{"type": "text", "text": "abc"}]}]
    cut = {"input_type": "query", "truncate": "START", "max_tokens": 2}
    posted(http, "/v2/embed", inputs=contents, **cut)
    assert http.engine.requests[-1].prompt_token_ids == ids_of("bc")
    assert "packs 8 numbers a byte, a vector has 4" in refusal(
        http, "/v2/embed", texts=["a"], embedding_types=["binary"]
    )


def test_coheres_bits_are_packed_highest_first():
    from frontend.http.pooling.embeddings import as_cohere
    from protocol.pooling import Pooled

    signs = [1, -1, 1, 1, -1, -1, -1, 1]
    vector = Pooled(shape=(8,), data=struct.pack("<8f", *signs))
    assert as_cohere("ubinary", [vector]) == [[0b10110001]]
    assert as_cohere("binary", [vector]) == [[0b10110001 - 128]]


def test_ollamas_two_routes(serve):
    http = serve(model_fields=VECTORS)
    body = posted(http, "/api/embed", model="fake", input=["ab", "c"])
    assert [each[0] for each in body["embeddings"]] == [2, 1]
    assert (body["model"], body["prompt_eval_count"]) == ("fake", 3)
    old = posted(http, "/api/embeddings", model="fake", prompt="x" * 5000, keep_alive="5m")
    assert old["embedding"][0] < 5000, "cut to the model's length"
    message = refusal(http, "/api/embed", model="fake", input="x" * 5000, truncate=False)
    assert "5000 characters, which are 1000 tokens or more" in message
    assert message.startswith("the input length exceeds the context length")
    for nothing in ([], ""):
        assert posted(http, "/api/embed", model="fake", input=nothing)["embeddings"] == []
    assert posted(http, "/api/embeddings", model="fake", prompt="") == {"embedding": []}
    asked = {"model": "fake", "input": "x" * 22, "options": {"num_ctx": 8.0}}
    assert posted(http, "/api/embed", **asked)["prompt_eval_count"] == 8
    assert "num_ctx is 8" in refusal(http, "/api/embed", **asked, truncate=False)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"input": []}, "input has 0 entries, give 1 to 2048"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input has 2049 entries, give 1 to 2048"),
        ("/v1/embeddings", {"input": "a", "foo": 1}, "'foo' is not supported; omit it"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "chat_template": "x"}, "chat_template needs messages"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "must be at least 1"),
        ("/v1/embeddings", {"input": ["a", [999]]}, "prompt 1 holds token id 999"),
        ("/v1/embeddings", {"input": ""}, "prompt is empty"),
        ("/v1/embeddings", {}, "give input or messages"),
        ("/pooling", {"input": "a", "task": "x"}, "the task is 'x', there is embed"),
        ("/classify", {"input": "a"}, "task is classify, this engine's tasks are embed"),
        ("/score", {"text_1": "a"}, "give text_1 and text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "data_1 has 2 texts and data_2 1"),
        ("/rerank", {"query": "a", "documents": []}, "documents has 0 entries"),
        ("/rerank", {"query": "a"}, "documents is missing"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "int8"),
        ("/v2/embed", {}, "texts has 0 entries"),
        ("/api/generate", {"model": "fake", "prompt": "a"}, '"fake" does not support generate'),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "task is gen"),
    ],
)  # fmt: skip
def test_what_cannot_be_pooled_is_refused_by_name(pooling_http, path, body, words):
    assert words in refusal(pooling_http, path, **body)


@pytest.fixture(scope="module")
def pooling_http(tmp_path_factory):
    address = f"ipc:///tmp/{tmp_path_factory.mktemp('p').parent.parent.name}-pooling.sock"
    with (
        FakeEngine(address, model_fields=VECTORS) as engine,
        serving(engine.address) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield http


def test_one_input_that_fails_ends_the_request_and_the_others(serve):
    fail = lambda request, _number: "broken" if request.prompt_token_ids == [A] else None  # noqa: E731
    http = serve(model_fields=VECTORS, fail=fail, step_s=0.02)
    answer = http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert answer.status_code == 500
    assert "ended with reason error: broken" in answer.json()["error"]["message"]
    assert posted(http, "/v1/embeddings", input="b")["data"][0]["embedding"][0] == 1
    assert not http.engine.num_live
