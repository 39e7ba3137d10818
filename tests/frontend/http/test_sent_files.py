"""Models of files that were sent to /api/blobs, before scripted daemons."""

import functools
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from http_server import serving_models

from frontend.cli.http import http as http_command
from frontend.event_loop import run
from frontend.http import server
from frontend.http.on_demand.model import DaemonPool, OnDemandModel
from frontend.http.on_demand.options import OnDemandOptions
from frontend.http.served_models import ServedModels
from frontend.presets import files
from protocol.presets import find_preset

SCRIPT = Path(__file__).with_name("on_demand_engine.py")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def http(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    starts = tmp_path / "starts"
    starts.mkdir()
    pool = DaemonPool(OnDemandOptions(command=(sys.executable, str(SCRIPT), str(starts))))
    served = ServedModels(
        [OnDemandModel("small", pool)], functools.partial(OnDemandModel, pool=pool)
    )
    with (
        serving_models(served, max_body_size=1000, request_timeout=0.4) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def send(http, data, digest=None):
    digest = digest or f"sha256:{hashlib.sha256(data).hexdigest()}"
    return digest, http.post(f"/api/blobs/{digest}", content=data)


def names(http):
    return sorted(each["name"] for each in http.get("/api/tags").json()["models"])


def refused(answer, status, words):
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]


def test_a_model_of_sent_files_is_served_under_its_name_until_it_is_deleted(http, monkeypatch):
    data = b"GGUF" + bytes(3_000_000)  # above --max-body-size, and more than is written at once
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"

    def slowly():  # longer than --request-timeout
        for start in range(0, len(data), 1_000_000):
            time.sleep(0.15)
            yield data[start : start + 1_000_000]

    assert http.post(f"/api/blobs/{digest}", content=slowly()).status_code == 201
    assert http.head(f"/api/blobs/{digest}").status_code == 200
    assert http.head(f"/api/blobs/sha256:{'0' * 64}").status_code == 404
    body = {"model": "mine", "files": {"m.gguf": digest}, "system": "S"}
    lines = http.post("/api/create", json=body).text.splitlines()
    assert [lines[0], lines[-1]] == ['{"status":"pulling manifest"}', '{"status":"success"}']
    http.post("/api/copy", json={"source": "mine", "destination": "twin"})
    folder = Path(find_preset("mine").from_)
    assert (folder / "m.gguf").read_bytes() == data
    assert names(http) == ["mine:latest", f"{folder.name}:latest", "small:latest", "twin:latest"]
    answer = http.post(
        "/api/chat", json={"model": "mine", "messages": HELLO, "stream": False, "keep_alive": "9m"}
    ).json()
    assert answer["prompt_eval_count"] == len("system:S;user:Hello;")
    poet = {"model": "poet", "from": "mine", "adapters": {"a.gguf": digest}}
    for is_idle in (False, True):
        assert (http.get("/health").json()["engines"][folder.name] == "stopped") == is_idle
        assert http.post("/api/create", json=poet).is_success
    assert find_preset("poet").from_ == str(folder)
    assert http.request("DELETE", "/api/delete", json={"model": "poet"}).is_success
    served = []
    monkeypatch.setattr(server, "serve", lambda _settings, start: served.append(run(start())) or 0)
    monkeypatch.setattr("frontend.cli.http.check_engine_options", lambda *_: None)  # for fakes
    assert http_command(model=["small"]) == 0
    listed = [name for each in served[0].models.with_presets() for name in each.names]
    assert sorted(listed) == ["mine", folder.name, "small", "twin"], "by the next server, too"
    assert http.request("DELETE", "/api/delete", json={"model": "twin"}).is_success
    assert folder.exists() and files.blob_file(digest).exists()
    other = {"model": "mine", "files": {"m.gguf": send(http, b"GGUF")[0]}}
    assert http.post("/api/create", json=other).is_success
    assert not folder.exists() and not files.blob_file(digest).exists()
    assert http.request("DELETE", "/api/delete", json={"model": "mine"}).is_success
    assert names(http) == ["small:latest"]


def test_a_model_that_is_to_be_fetched_is_made_anew(http):
    body = {"model": "pirate", "from": "qwen3:0.6b", "system": "S", "stream": False}
    assert http.post("/api/create", json=body).json() == {"status": "success"}
    assert names(http) == ["pirate:latest", "qwen3:0.6b", "small:latest"]


def test_what_is_not_what_its_digest_says_or_has_no_room_is_refused(http, monkeypatch):
    old = files.folder_of({})
    blob, _ = send(http, b"old")
    for each in (old, files.blob_file(blob)):
        os.utime(each, (0, 0))
    digest, answer = send(http, b"GGUF", f"sha256:{'a' * 64}")
    assert not old.exists() and not files.blob_file(blob).exists()
    refused(answer, 400, "digest mismatch, expected 'sha256:aaa")
    assert not files.blob_file(digest).exists()
    refused(
        http.post("/api/create", json={"model": "x", "files": {"a.gguf": digest}}),
        400,
        "there is no blob 'sha256:aaa",
    )
    refused(http.post("/api/create", json={"model": "x", "files": {"a": digest}}), 400, "no model")
    usage = SimpleNamespace(total=2**40, free=2**30 + 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    refused(send(http, b"GGUF")[1], 507, "4 bytes are to come")
    assert [*files.blob_file(digest).parent.iterdir()] == []
