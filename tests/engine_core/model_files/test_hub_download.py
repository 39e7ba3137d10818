"""Models of a hub of this machine: fetched by huggingface_hub's own client, and resumed and checked
by ours."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_hub import LocalHub

from engine_core.model_files import transfer
from engine_core.model_files.errors import DownloadFailed, ModelNotFound
from engine_core.model_files.hub import HubName, download_from_hub

FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": os.urandom(21_000_000),  # the client takes pieces of 10 MB
    "consolidated.safetensors": b"the same again",
    "original/model.safetensors": b"the same again",
    "picture.png": b"not wanted",
}
GGUFS = {
    "tiny-Q4_K_M.gguf": b"GGUF of Q4_K_M",
    "Q8_0/tiny-Q8_0-00001-of-00002.gguf": b"GGUF first",
    "Q8_0/tiny-Q8_0-00002-of-00002.gguf": b"GGUF second",
    "mmproj-tiny-f16.gguf": b"GGUF of an encoder",
    "mmproj-tiny-Q8_0.gguf": b"GGUF of an encoder, smaller",
}
WEIGHTS, TINY = "model.safetensors", "tiny-Q4_K_M.gguf"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """For this process, too: huggingface_hub reads its settings when it is imported."""
    repos = {"org/tiny-GGUF": dict(GGUFS), "org/tiny": dict(FILES)}
    with LocalHub(repos).serving() as hub:
        settings = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": False,
        }
        for name, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(transfer, "_WAITS_S", (0.01, 0.01, 0.01))
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _s: None)
        yield hub


@pytest.fixture
def offline(monkeypatch):
    return lambda: monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def fetch(tag=None, name="org/tiny-GGUF", **more):
    return download_from_hub(HubName(name, tag=tag), report=lambda _line: None, **more)[0]


def pull(name, hub, home):
    command = [sys.executable, "-m", "engine_core.cli", "pull", name, "--json"]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


@pytest.mark.slow
def test_a_pull_that_was_killed_is_resumed_by_the_next_one(hub, tmp_path):
    hub.faults[WEIGHTS] = ["hang"]
    first = pull("org/tiny", hub, tmp_path)
    deadline = time.monotonic() + 60
    partial = tmp_path / "hub/models--org--tiny/blobs"
    while sum(file.stat().st_size for file in partial.glob("*.incomplete")) < 10_000_000:
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    first.kill()
    first.communicate()
    out, err = pull("org/tiny", hub, tmp_path).communicate()
    *statuses, last = [json.loads(line) for line in out.splitlines()]
    assert last["status"] == "success", err
    found = {file.name: file.read_bytes() for file in Path(last["path"]).iterdir()}
    assert found == {name: FILES[name] for name in ("config.json", WEIGHTS)}
    (_, _, nothing, _), (_, _, resumed, _) = hub.gets_of("raw/" + WEIGHTS)
    assert nothing is None
    assert int(resumed.removeprefix("bytes=").rstrip("-")) >= 10_000_000
    told = [status["completed"] for status in statuses if "completed" in status]
    assert told == sorted(told)
    assert told[0] >= 10_000_000
    assert told[-1] == len(FILES[WEIGHTS]) == last["bytes"]
    digest = hashlib.sha256(FILES[WEIGHTS]).hexdigest()
    assert {status["digest"] for status in statuses if "total" in status} == {f"sha256:{digest}"}
    assert "verifying sha256 digest" in [status["status"] for status in statuses]
    assert list(partial.glob("*.incomplete")) == []


def test_a_connection_that_breaks_is_taken_up_again_and_no_token_goes_to_the_cdn(hub):
    hub.faults[WEIGHTS] = ["cut", 503, 429]
    hub.faults["/org/tiny"] = hub.faults["revision/main"] = [429, 503]
    assert (fetch(name="org/tiny") / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    gets = hub.gets_of("raw/" + WEIGHTS)
    assert [each[2] is None for each in gets] == [True, False, False, False]
    assert {each[3] for each in gets} == {None}
    assert hub.gets_of(f"main/{WEIGHTS}") == []
    assert {each[3] for each in hub.asked if each[1].startswith("/api/models")} == {
        "Bearer hf_secret"
    }


def test_what_has_another_hash_is_not_kept(hub):
    hub.faults[TINY] = [b"GGUF of others"]
    with pytest.raises(DownloadFailed, match=r"not the expected file: 14 bytes with SHA-256"):
        fetch("Q4_K_M")
    assert fetch("Q4_K_M").read_bytes() == GGUFS[TINY]


def test_a_tag_has_all_its_parts_and_the_encoder_comes_along(hub, offline):
    path, mmproj = download_from_hub(HubName("org/tiny-GGUF", tag="q8_0"), report=print)
    assert [file.read_bytes() for file in sorted(path.parent.iterdir())] == [
        b"GGUF first", b"GGUF second",
    ]  # fmt: skip
    assert mmproj.read_bytes() == b"GGUF of an encoder"
    assert not list(mmproj.parent.glob("*Q4*"))
    assert not list(mmproj.parent.glob("mmproj*Q8*"))
    assert download_from_hub(HubName("org/tiny-GGUF"), report=print, wants_mmproj=False)[1] is None
    num_asked = len(hub.asked)
    offline()
    assert download_from_hub(HubName("org/tiny-GGUF", tag="Q8_0"), report=print) == (path, mmproj)
    assert len(hub.asked) == num_asked


def test_what_another_program_fetched_is_found_and_ours_is_found_by_it(hub, offline):
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache

    path = fetch("Q4_K_M", wants_mmproj=False)
    assert try_to_load_from_cache("org/tiny-GGUF", TINY) == str(path)
    hf_hub_download("org/tiny", "config.json")
    num_asked = len(hub.gets_of(TINY))
    assert fetch("Q4_K_M", wants_mmproj=False) == path
    assert snapshot_download("org/tiny-GGUF", allow_patterns=[TINY]) == str(path.parent)
    assert len(hub.gets_of(TINY)) == num_asked
    offline()
    with pytest.raises(DownloadFailed, match=r"cache does not have it \(org/tiny .* HF_HUB_OFFLI"):
        fetch(name="org/tiny")
    with pytest.raises(DownloadFailed, match=r"cache does not have it \(.*no GGUF files"):
        fetch("Q8_0")
    assert fetch("Q4_K_M") == path


def test_what_was_fetched_is_served_while_the_hub_is_down(hub):
    path = fetch("Q4_K_M")
    hub.faults["/org/tiny-GGUF"] = [503]
    assert fetch("Q4_K_M") == path


@pytest.mark.parametrize(
    ("name", "faults", "words"),
    [
        ("org/nothing", [], "is not on the Hugging Face hub, or private"),
        ("org/gated", [], "asks for consent first"),
        ("org/private", [], "is not on the Hugging Face hub, or private; .*hf auth login"),
        ("org/tiny-GGUF", [401] * 2, "401 Unauthorized.*; check HF_TOKEN, or log in"),
        ("org/tiny-GGUF", [429] * 5, "429 Too Many Requests"),
        ("org/tiny-GGUF", [503] * 5, "503"),
    ],
)
def test_what_the_hub_refuses_is_said(hub, name, faults, words):
    hub.faults["org/tiny-GGUF"] = faults
    with pytest.raises(DownloadFailed, match=words):
        fetch(name=name)


def test_a_revision_that_is_not_there_is_named(hub):
    with pytest.raises(DownloadFailed, match="no revision v9"):
        download_from_hub(HubName("org/tiny-GGUF", revision="v9"), report=print)


def test_a_full_disk_is_said_before_anything_is_fetched(hub, monkeypatch):
    class Disk:
        free = 10_000_000

    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _folder: Disk)
    words = r"disk is full: org/tiny .*\(21 MB are needed, 10 MB are free\); .* HF_HOME"
    with pytest.raises(DownloadFailed, match=words):
        fetch(name="org/tiny")
    assert hub.gets_of(WEIGHTS) == []


def test_a_type_that_is_not_there_is_no_download(hub):
    with pytest.raises(ModelNotFound, match=r"of type Q5_0; name one of Q8_0, Q4_K_M"):
        fetch("Q5_0")
