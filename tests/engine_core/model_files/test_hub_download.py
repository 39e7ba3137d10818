"""`engine-core pull` from a hub of this machine."""

import errno
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core.model_files import hub as hub_module
from engine_core.model_files.errors import DownloadFailed
from engine_core.model_files.hub import HubName, download_from_hub

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": os.urandom(11_000_000),  # the client keeps whole pieces of 10 MiB
    "consolidated.safetensors": b"the same again",
    "original/model.safetensors": b"the same again",
    "picture.png": b"not wanted",
}
GGUFS = {f"tiny-{kind}.gguf": kind.encode() for kind in ("Q4_K_M", "Q8_0")}


class Hub(http.server.BaseHTTPRequestHandler):
    """The routes that huggingface_hub asks; the first connection for the weights breaks."""

    protocol_version = "HTTP/1.1"
    ranges: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind, _, rest = self.path.partition("?")[0].removeprefix("/api").strip("/").partition("/")
        for repo, files in {"org/tiny-GGUF": GGUFS, "org/tiny": FILES}.items():
            if kind == "models" and rest.startswith(f"{repo}/tree"):
                listed = [
                    {"type": "file", "path": name, "size": len(data), "oid": "b" * 40}
                    for name, data in files.items()
                ]
                return self.say_json(200, listed)
            if kind == "models" and rest.startswith(repo):
                siblings = [{"rfilename": name} for name in files]
                return self.say_json(200, {"id": repo, "sha": COMMIT, "siblings": siblings})
            if self.path.startswith(f"/{repo}/resolve/"):
                name = self.path.rpartition("/")[2]
                return self.say_file(name, files[name])
        refusals = {"org/gated": "GatedRepo"}
        code = next((code for name, code in refusals.items() if name in rest), "RepoNotFound")
        status = 403 if code == "GatedRepo" else 404
        return self.say_json(status, {}, {"x-error-code": code, "x-error-message": "no"})

    def say_file(self, name: str, data: bytes) -> None:
        asked = self.headers.get("range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        headers = {
            "etag": f'"{hashlib.sha1(name.encode()).hexdigest()}"',
            "x-repo-commit": COMMIT,
            "accept-ranges": "bytes",
            "content-length": str(len(data) - start),
        }
        if asked:
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.say(206 if asked else 200, headers)
        if self.command == "HEAD":
            return
        if name == "model.safetensors":
            self.ranges.append(asked or "")
            if len(self.ranges) == 1:
                self.wfile.write(data[:10_800_000])
                self.close_connection = True
                return
        self.wfile.write(data[start:])

    def say_json(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.say(status, {"content-length": str(len(data)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def say(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.ranges = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pull(
    name: str, endpoint: str, home: Path, offline: str = "0"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine_core.cli", "pull", name, "--json"]
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_a_broken_download_is_resumed_and_its_bytes_are_told(hub: str, tmp_path: Path) -> None:
    done = pull("org/tiny", hub, tmp_path)
    *statuses, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last["status"] == "success", done.stderr
    folder = Path(last["path"])
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert found == {
        name: data for name, data in FILES.items() if name in ("config.json", "model.safetensors")
    }
    told = [status["completed"] for status in statuses if "completed" in status]
    total = sum(map(len, found.values()))
    assert told == sorted(told)
    assert told[-1] == total
    assert last["bytes"] == len(FILES["model.safetensors"])
    first, *resumed = Hub.ranges
    assert first == ""
    assert [each.startswith("bytes=") for each in resumed] == [True]
    again = pull("org/tiny", hub, tmp_path)
    assert json.loads(again.stdout.splitlines()[-1])["path"] == str(folder)
    assert len(Hub.ranges) == 2


@pytest.mark.slow
def test_a_gguf_file_is_named_by_its_type_and_found_again_without_the_hub(
    hub: str, tmp_path: Path
) -> None:
    for name, offline, kind in (
        ("org/tiny-GGUF", "0", "Q4_K_M"),
        ("hf.co/org/tiny-GGUF:q8_0", "0", "Q8_0"),
        ("org/tiny-GGUF:Q8_0", "1", "Q8_0"),
    ):
        done = pull(name, hub, tmp_path, offline)
        last = json.loads(done.stdout.splitlines()[-1])
        assert Path(last["path"]).read_text() == kind
        assert last["bytes"] == len(kind)
    refused = pull("org/tiny-GGUF:Q5_0", hub, tmp_path)
    assert (refused.returncode, refused.stdout.count("\n")) == (3, 1)
    assert "name one of Q4_K_M, Q8_0, as org/tiny-GGUF:Q4_K_M" in refused.stderr
    env = {**os.environ, "HF_HOME": str(tmp_path), "ENGINE_CORE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "engine_core.cli"]
    listed = subprocess.run([*command, "list"], capture_output=True, text=True, env=env)
    assert "org/tiny-GGUF" in listed.stdout
    subprocess.run([*command, "rm", "org/tiny-GGUF"], check=True, env=env)


def test_a_full_disk_is_not_the_hubs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_arguments: object, **_options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(hub_module, "_file_names", lambda _name: list(FILES))
    with pytest.raises(DownloadFailed, match=r"the disk is full: org/name .* HF_HOME"):
        download_from_hub(HubName("org/name"), report=print)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/nothing", "is not on the Hugging Face hub, or private"),
        ("org/gated", "asks for consent"),
    ],
)
def test_what_the_hub_refuses_is_said(hub: str, tmp_path: Path, name: str, words: str) -> None:
    done = pull(name, hub, tmp_path)
    assert done.returncode == 3
    assert words in done.stderr
