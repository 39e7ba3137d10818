"""Adapters over HTTP: vLLM's two routes, and adapters as models in every API."""


def load(http, name, path="somewhere", **more):
    body = {"lora_name": name, "lora_path": path, **more}
    return http.post("/v1/load_lora_adapter", json=body)


def models(http):
    return {card["id"]: card["parent"] for card in http.get("/v1/models").json()["data"]}


BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/api/generate": {"prompt": "abc", "stream": False, "options": {"num_predict": 2}},
}


def test_an_adapter_is_a_model_by_its_name_in_every_api(engine, http):
    assert load(http, "poet").status_code == 200
    for path, body in BODIES.items():
        answer = http.post(path, json={"model": "poet", **body})
        assert answer.status_code == 200
        assert answer.json()["model"] == "poet"
        assert engine.requests[-1].adapter == "poet"
        http.post(path, json={"model": "fake", **body})
        assert engine.requests[-1].adapter is None


def test_adapters_are_listed_with_their_model_and_leave_again(http):
    """Proves S206."""
    assert models(http) == {"fake": None}
    answer = load(http, "poet")
    assert answer.text == "Success: LoRA adapter 'poet' added successfully."
    assert models(http) == {"fake": None, "poet": "fake"}
    assert http.get("/v1/models/poet").json()["root"] == "poet"
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "poet", "lora_int_id": 1})
    assert gone.text == "Success: LoRA adapter 'poet' removed successfully."
    assert models(http) == {"fake": None}
    answer = http.post("/v1/completions", json={"model": "poet", "prompt": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_a_field_that_is_not_known_is_refused_by_name(http):
    answer = load(http, "poet", base_model_name="fake")
    assert answer.status_code == 400 and "base_model_name" in answer.text
