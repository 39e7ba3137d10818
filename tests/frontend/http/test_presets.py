"""Presets of a served model, in every API; and Ollama's routes that make them."""

import contextlib

import httpx
import pytest
from fake_engine import FakeEngine
from fake_model import TOKENIZER, ids_of
from http_server import key_file, serving, serving_models

from frontend.async_llm import AsyncLLM
from frontend.cli.http import http as http_command
from frontend.event_loop import run
from frontend.http import server
from frontend.http.served_models import ServedModel, ServedModels
from frontend.presets.llm import adapter_options
from protocol.presets import (
    Parameters,
    Preset,
    PresetMessage,
    find_preset,
    preset_file,
    write_preset,
)

HELLO = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/responses": {"input": "Hello"},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hello"},
}
SAMPLERS = {
    "samplers": ["dry", "temp", "top-k"], "dry_multiplier": 0.5, "dry_allowed_length": 1,
    "dry_sequence_breakers": [], "repeat_last_n": 5, "mirostat": 0, "mirostat_tau": 5.0,
}  # fmt: skip
BEGIN = "system:S;user:Hi;assistant:Yo;"
MARIO = Preset(
    from_="fake",
    system="S",
    messages=[PresetMessage("user", "Hi"), PresetMessage("assistant", "Yo")],
    parameters=Parameters(
        temperature=0.5,
        top_k=3,
        seed=7,
        repeat_penalty=1.5,
        presence_penalty=0.25,
        typical_p=0.9,
        repeat_last_n=64,
        num_predict=4,
        stop=["zzz"],
    ),
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    write_preset("mario", MARIO)


def ask(http, path, **fields):
    body = {"model": "mario", "stream": False, **BODIES[path], **fields}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(request):
    return TOKENIZER.decode(request.prompt_token_ids)


def post(http, path, **body):
    return http.post(path, json=body)


def refused(answer, status, says):
    assert answer.status_code == status, answer.text
    assert says in answer.text


def test_a_preset_is_a_model_in_every_api(http, engine):
    for path in BODIES:
        assert ask(http, path)["model"] == "mario"
        request = engine.requests[-1]
        assert prompt_of(request) == BEGIN + "user:Hello;", path
        params = request.sampling_params
        assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 7)
        assert (params.repetition_penalty, params.presence_penalty) == (1.5, 0.25)
        assert (params.chain.typical_p, params.chain.repeat_last_n) == (0.9, 64)
        assert params.has_stop_strings
        assert params.max_tokens == (9 if path == "/v1/messages" else 4)
    for path in ("/v1/chat/completions", "/api/generate"):
        fields = {"options": {"num_predict": 2}} if path[1] == "a" else {"max_tokens": 2}
        ask(http, path, model="fake", **fields)
        assert prompt_of(engine.requests[-1]) == "user:Hello;"
        assert not engine.requests[-1].sampling_params.has_stop_strings


def test_what_a_request_says_goes_before(http, engine):
    said = [{"role": "system", "content": "T"}, *HELLO]
    for path, more in {
        "/v1/chat/completions": {"messages": said, "temperature": 0, "seed": 1, "max_tokens": 2}
        | SAMPLERS,
        "/v1/messages": {"system": "T", "temperature": 0, "max_tokens": 2},
        "/v1/responses": {"instructions": "T", "temperature": 0, "max_output_tokens": 2},
        "/api/chat": {
            "messages": said,
            "options": {"temperature": 0, "num_predict": 2} | SAMPLERS,
        },
        "/api/generate": {"system": "T", "options": {"temperature": 0, "num_predict": 2}},
    }.items():
        ask(http, path, **more)
        request = engine.requests[-1]
        assert prompt_of(request) == "system:T;user:Hi;assistant:Yo;user:Hello;", path
        assert (request.sampling_params.temperature, request.sampling_params.max_tokens) == (0, 2)
        assert request.sampling_params.top_k == 3
        chain = request.sampling_params.chain
        if path in ("/v1/chat/completions", "/api/chat"):
            assert (chain.samplers, chain.repeat_last_n) == (("dry", "temperature", "top_k"), 5)
            assert (chain.dry_allowed_length, chain.dry_breakers) == (1, ())
        else:
            assert chain.repeat_last_n == 64


def test_a_known_name_is_the_same_model_with_a_tag_or_without(serve):
    http = serve("qwen3")
    write_preset("pirate", Preset(from_="qwen3:8b", system="S"))
    write_preset("other", Preset(from_="qwen3:4b"))
    for name in ("pirate", "qwen3", "qwen3:8b", "qwen3:latest", "Qwen3:8b"):
        assert ask(http, "/api/chat", model=name)["model"] == name
        assert http.engine.requests[-1].prompt_token_ids[:1] == ids_of("us"[name == "pirate"])
    for name in ("other", "qwen3:4b"):
        body = {"model": name, "messages": HELLO}
        refused(http.post("/api/chat", json=body), 404, "not found; this server has qwen3")


def test_a_text_prompt_has_the_sampling_alone(http, engine):
    answer = post(http, "/v1/completions", model="mario", prompt="Hello").json()
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("mario", 4)
    assert prompt_of(engine.requests[-1]) == "Hello"
    assert engine.requests[-1].sampling_params.temperature == 0.5
    raw = post(http, "/api/generate", model="mario", prompt="Hello", raw=True, stream=False)
    assert raw.status_code == 200
    assert prompt_of(engine.requests[-1]) == "Hello"
    whole = Parameters(num_predict=-1, num_ctx=30)
    write_preset("mario", Preset(from_="fake", parameters=whole))
    answer = post(http, "/v1/completions", model="mario", prompt="Hello", ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 30 - len("Hello")


def test_a_context_has_the_messages_of_its_preset_once(http, engine):
    context = ask(http, "/api/generate")["context"]
    ask(http, "/api/generate", context=context)
    assert prompt_of(engine.requests[-1]) == TOKENIZER.decode(context) + "user:Hello;"


def test_tokens_are_counted_with_what_the_preset_adds(http):
    counted = post(http, "/v1/messages/count_tokens", model="mario", messages=HELLO).json()
    assert counted == {"input_tokens": len(BEGIN + "user:Hello;")}
    assert post(http, "/tokenize", model="mario", messages=HELLO).json()["count"] == 41


def test_a_template_and_a_length_of_its_own(http, engine):
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    write_preset("x", Preset(from_="fake", template=template, parameters=Parameters(num_ctx=20)))
    for path in BODIES.keys() - {"/v1/messages"}:
        answer = ask(http, path, model="x")
        assert prompt_of(engine.requests[-1]) == "<Hello>"
        assert engine.requests[-1].sampling_params.max_tokens == 20 - len("<Hello>"), answer
    long = [{"role": "user", "content": "x" * 30}]
    refused(post(http, "/v1/chat/completions", model="x", messages=long), 400, "limit is 19")
    cards = {card["id"]: card["max_model_len"] for card in http.get("/v1/models").json()["data"]}
    assert cards == {"fake": 512, "mario": 512, "x": 20}
    ask(http, "/api/chat", model="fake", options={"num_predict": 2})
    assert prompt_of(engine.requests[-1]) == "user:Hello;"


def test_an_adapter_is_loaded_once_and_is_no_model_by_itself(http, engine):
    short = Parameters(num_predict=2)
    for name, system in (("poet", None), ("poet2", "S")):
        poet = Preset(from_="fake", system=system, adapter="/adapters/poet", parameters=short)
        write_preset(name, poet)
    for path in BODIES:
        for name in ("poet", "poet2"):
            ask(http, path, model=name)
            assert engine.requests[-1].adapter.startswith("preset-")
    assert len(engine.adapters) == 1
    ask(http, "/api/chat")
    assert engine.requests[-1].adapter is None
    assert 'ADAPTER "poet"' in post(http, "/api/show", model="poet").json()["modelfile"]
    cards = {card["id"]: card["parent"] for card in http.get("/v1/models").json()["data"]}
    assert cards == {"fake": None, "mario": "fake", "poet": "fake", "poet2": "fake"}


def test_a_daemon_that_is_started_has_the_adapters_of_its_presets(tmp_path):
    (tmp_path / "model").mkdir()
    model, poet = str(tmp_path / "model"), str(tmp_path)
    for name, source, adapter in (
        ("a", model, poet), ("b", model, poet), ("c", model, "/gone"), ("d", "other", poet)
    ):  # fmt: skip
        write_preset(name, Preset(from_=source, adapter=adapter))
    (option,) = adapter_options(model)
    assert option == f"--adapter={find_preset('a').adapter_name}={poet}"
    assert adapter_options("fake") == []


def test_a_change_holds_from_the_next_request_on(http, engine):
    ask(http, "/api/chat")
    write_preset("mario", Preset(from_="fake", system="Z", parameters=Parameters(num_predict=2)))
    ask(http, "/api/chat")
    assert prompt_of(engine.requests[-1]) == "system:Z;user:Hello;"
    preset_file("mario").write_text("{")
    refused(post(http, "/api/chat", model="mario"), 500, "'mario' cannot be read; see the server")
    assert [each["name"] for each in http.get("/api/tags").json()["models"]] == ["fake:latest"]
    write_preset("mario", Preset(from_="another"))
    answer = post(http, "/v1/chat/completions", model="mario", messages=HELLO)
    refused(
        answer, 404, "the model 'mario (a preset of another)' does not exist; this server has fake"
    )
    answer = post(http, "/api/chat", model="mario", messages=HELLO)
    refused(answer, 404, "model 'mario (a preset of another)' not found; this server has fake")


def test_the_preset_that_is_served_is_meant_where_none_is_named(engine):
    models = [ServedModel(lambda: AsyncLLM(engine.address), ["fake"])]
    with serving_models(ServedModels(models, default="mario")) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO}, timeout=20)
        assert answer.json()["model"] == "mario"
        names = [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]
        assert names == ["mario", "fake"]


@pytest.mark.parametrize(
    ("given", "names", "default"),
    [
        (["mario"], ["fake"], "mario"),
        (["mario", "fake", "luigi"], ["fake", "tiny"], None),
        (["small=ipc:///x"], ["small"], None),
    ],
)
def test_a_preset_that_is_to_be_served_stands_for_its_model(monkeypatch, given, names, default):
    write_preset("luigi", Preset(from_="tiny"))
    served = []
    monkeypatch.setattr(server, "serve", lambda _settings, start: served.append(run(start())) or 0)
    monkeypatch.setattr("frontend.cli.http.check_engine_options", lambda *_: None)  # for fakes
    assert http_command(model=given) == 0
    (backend,) = served
    assert [name for model in backend.models for name in model.names] == names
    assert (backend.models.with_presets()[0].names == (default,)) == (default is not None)


def test_ollamas_create_show_copy_and_delete(http, engine):
    fields = {"system": "P", "parameters": {"temperature": 0, "stop": "x"}, "license": ["A", "B"]}
    messages = [{"role": "user", "content": "Q", "images": None}]
    made = post(http, "/api/create", model="pirate", **{"from": "fake:latest"}, **fields)
    assert made.headers["content-type"] == "application/x-ndjson"
    assert made.text.endswith('{"status":"success"}\n')
    again = {"model": "pirate2", "from": "pirate:latest", "messages": messages, "stream": False}
    again["parameters"] = {"num_predict": 2}
    assert http.post("/api/create", json=again).json() == {"status": "success"}
    shown = post(http, "/api/show", model="pirate2").json()
    assert shown["modelfile"].startswith('FROM fake\nSYSTEM "P"\n')
    lines = shown["parameters"].splitlines()
    assert lines[:3] == ["num_predict 2", "temperature 0.0", 'stop "x"']
    assert (shown["system"], shown["license"]) == ("P", "A\nB")
    assert shown["details"]["parent_model"] == "fake"
    ask(http, "/api/chat", model="pirate2:latest")
    assert prompt_of(engine.requests[-1]) == "system:P;user:Q;user:Hello;"
    assert post(http, "/api/copy", source="pirate2", destination="p3").status_code == 200
    assert find_preset("p3") == find_preset("pirate2")
    assert http.request("DELETE", "/api/delete", json={"model": "pirate2"}).status_code == 200
    names = {each["name"] for each in http.get("/api/tags").json()["models"]}
    assert names == {"fake:latest", "mario:latest", "pirate:latest", "p3:latest"}


def test_what_cannot_be_made_is_refused_by_name(http):
    def create(says, status=400, **body):
        refused(http.post("/api/create", json={"model": "x", "from": "fake", **body}), status, says)

    create("model 'nope' not found; this server has fake, mario", 404, **{"from": "nope"})
    create("from is missing", **{"from": None})
    create("quantize is 'q4_0', which is not supported", quantize="q4_0")
    create("files need a server that starts models", files={"a.gguf": "sha256:0"})
    create("the digest is 'sha256:0'", adapters={"a.gguf": "sha256:0"})
    create("there is no blob", adapters={"a.gguf": f"sha256:{'0' * 64}"})
    create("cannot be a file's name", adapters={"adapter_config.json": "x", "../a": "x"})
    create("adapters are no adapter", adapters={"a": "sha256:0"})
    create("'parameters.mirostat' is not supported", parameters={"mirostat": 1})
    create("parameters.temperature: Expected", parameters={"temperature": -1})
    create("one of Go's", template="{{ .System }}")
    create("does not parse, line 1", template="{% if %}")
    create("cannot be a preset's name", model="../x")
    create("'fake:latest' is a model that this server serves", model="fake:latest")
    refused(post(http, "/api/copy", source="nope", destination="y"), 404, "not found")
    refused(http.request("DELETE", "/api/delete", json={"model": "fake"}), 400, "that this server")
    refused(http.request("DELETE", "/api/delete", json={"model": "y"}), 404, "model 'y' not found")
    refused(http.post("/api/blobs/sha256:00", content=b"GGUF"), 400, "the digest is 'sha256:00'")
    refused(post(http, "/api/push", model="fake"), 400, "models are not pushed")
    assert {each["name"] for each in http.get("/api/tags").json()["models"]} == {
        "fake:latest",
        "mario:latest",
    }


def test_with_keys_only_an_admin_changes_names(engine: FakeEngine, tmp_path):
    keys = [{"name": "ann", "key": "a"}, {"name": "root", "key": "r", "admin": True}]
    with contextlib.ExitStack() as servers:
        url = servers.enter_context(serving(engine.address, api_key_file=key_file(tmp_path, *keys)))
        ann, root = (
            servers.enter_context(httpx.Client(base_url=url, headers={"x-api-key": key}))
            for key in "ar"
        )
        body = {"model": "x", "from": "mario", "stream": False}
        for http, status in ((ann, 403), (root, 200)):
            assert http.post("/api/create", json=body).status_code == status
            copied = http.post("/api/copy", json={"source": "mario", "destination": "y"})
            assert copied.status_code == status
        assert ann.post("/api/chat", json={**body, "messages": HELLO, "from": None}).is_success
        for http, status in ((ann, 403), (root, 200)):
            assert http.request("DELETE", "/api/delete", json={"model": "y"}).status_code == status
