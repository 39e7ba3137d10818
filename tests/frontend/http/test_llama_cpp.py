"""Routes of llama.cpp's server before a scripted engine."""


def test_props_describe_the_model(serve):
    http = serve("small")
    props = http.get("/props").json()
    assert http.get("/props?model=other").status_code == 404
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert (props["model_alias"], props["model_path"]) == ("small", "fake")
    assert props["total_slots"] == 64
    assert "m.role" in props["chat_template"]


def test_a_slot_is_in_use_while_a_request_runs(serve):
    http = serve(step_s=0.02, max_num_seqs=1)
    body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    for path in ("/slots", "/slots?fail_on_no_slot=1"):
        assert [slot["is_processing"] for slot in http.get(path).json()] == [False]
    with http.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.iter_raw()
        next(chunks)
        assert [slot["is_processing"] for slot in http.get("/slots").json()] == [True]
        assert http.get(path).status_code == 503
