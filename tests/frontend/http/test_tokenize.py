"""/tokenize and /detokenize: vLLM's shapes, and the tokens that a request would have."""

import pytest
from fake_model import EOS, EOS_ID, MAX_MODEL_LEN, ids_of

HELLO = [{"role": "user", "content": "Hi"}]


def test_a_text_and_its_tokens(http):
    answer = http.post("/tokenize", json={"prompt": "Hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": ids_of("Hé"),
        "token_strs": ["H", "Ã", "©"],
    }
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {
        "prompt": "Hé",
        "content": "Hé",
    }


def test_a_conversation_has_the_tokens_of_its_request(http, engine):
    answer = http.post("/tokenize", json={"messages": HELLO}).json()
    http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1})
    assert answer["tokens"] == engine.requests[0].prompt_token_ids
    assert answer["token_strs"] is None


def test_special_tokens_are_shown(http):
    assert http.post("/detokenize", json={"tokens": [EOS_ID]}).json() == {
        "prompt": EOS,
        "content": EOS,
    }


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"content": ["x", 10**12], "with_pieces": True}, "content"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**12]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_is_none_is_refused_by_name(http_of_refusals, path, body, param):
    response = http_of_refusals.post(path, json=body)
    assert response.status_code == 400
    assert param in (response.json()["error"]["param"] or response.json()["error"]["message"])
