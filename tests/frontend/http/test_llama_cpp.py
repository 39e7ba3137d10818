"""Routes of llama.cpp's server before a scripted engine."""

import httpx
import pytest
from http_server import serving


def test_props_describe_the_model(engine):
    with serving(engine.address, "small") as url, httpx.Client(base_url=url) as http:
        props = http.get("/props").json()
        assert http.get("/props?model=other").status_code == 404
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert (props["model_alias"], props["model_path"]) == ("small", "fake")
    assert props["total_slots"] == 64
    assert "m.role" in props["chat_template"]


@pytest.mark.parametrize(("path", "status"), [("/slots", 200), ("/slots?fail_on_no_slot=1", 503)])
def test_a_slot_is_in_use_while_a_request_runs(start_engine, path, status):
    engine = start_engine(step_s=0.02, max_num_seqs=1)
    body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serving(engine.address) as url, httpx.Client(base_url=url) as http:
        assert [slot["is_processing"] for slot in http.get(path).json()] == [False]
        with http.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.iter_raw()
            next(chunks)
            in_use = http.get(path)
        assert in_use.status_code == status
        if status == 200:
            assert [slot["is_processing"] for slot in in_use.json()] == [True]
