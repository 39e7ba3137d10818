"""What a name means, and a file at an address: of a server of this machine."""

import errno
import hashlib
import os

import pytest
from local_hub import LocalHub

from engine_core.model_files.download import KNOWN_MODELS, find_known_model
from engine_core.model_files.errors import DownloadFailed, ModelNotFound, unreadable
from engine_core.model_files.file_url import FileUrl, fetch_url, fetched_urls, parse_file_url
from engine_core.model_files.hub import HubName
from engine_core.model_files.names import describe_known_names, resolve_name
from engine_core.model_files.open import locate_model
from protocol.known_names import known_names

FILE = "m-Q8_0.gguf"
PARTS = [f"parts/m-0000{number}-of-00002.gguf" for number in (1, 2)]


def test_every_known_name_means_a_file_of_the_hub_or_a_model_of_a_wheel():
    for name, tags in known_names().items():
        (first, usual), *tagged = tags.items()
        assert first == "default"
        assert usual in dict(tagged)
        for tag, meant in tagged:
            id, _, file = meant.partition(":")
            wheel = find_known_model(meant)
            assert resolve_name(f"{name}:{tag}") == (wheel or HubName(id, tag=file or None))
            assert wheel is not None or id.count("/") == 1
        assert resolve_name(name.upper()) == resolve_name(f"{name}:{usual}")


def test_models_of_wheels_are_what_they_were():
    for model in KNOWN_MODELS:
        for name in (model.name, *model.aliases):
            assert resolve_name(name) is resolve_name(f"{name}:latest") is find_known_model(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3", HubName("Qwen/Qwen3-8B-GGUF", tag="Q4_K_M")),
        ("Qwen3:0.6b", HubName("Qwen/Qwen3-0.6B-GGUF", tag="Q8_0")),
        ("embeddinggemma", HubName("unsloth/embeddinggemma-300m")),
        ("org/name:Q8_0", HubName("org/name", tag="Q8_0")),
        ("https://example.com/m.gguf?x=1", FileUrl("https://example.com/m.gguf?x=1")),
        (
            "https://example.com/m-00002-of-00003.gguf",
            FileUrl("https://example.com/m-00001-of-00003.gguf"),
        ),
        ("nothing", None),
        ("nothing:8b", None),
    ],
)
def test_a_name_means_one_thing(name, meant):
    assert resolve_name(name) == meant


def test_a_tag_that_is_not_there_lists_those_that_are():
    with pytest.raises(ModelNotFound, match=r"qwen3 has no '9b'; name one of 0\.6b, .*as qwen3:8b"):
        resolve_name("qwen3:9b")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("qwen3:8", "qwen3:8b"), ("lama3.1", "llama3.1"), ("gptoss:20b", "gpt-oss:20b")],
)
def test_a_name_that_nothing_has_lists_the_nearest(typed, nearest):
    assert f"did you mean {nearest}" in describe_known_names(typed)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.com/m.gguf", "could be changed on the way; give an https address"),
        ("https://example.com/m.safetensors", r"not the address of a \.gguf file"),
        ("https://example.com/../../m.gguf", r"not the address of a \.gguf file"),
        ("https://me:secret@example.com/m.gguf", r"not the address of a \.gguf file"),
        ("https://example.com/m.gguf#sha256=12", "64 hexadecimal digits"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(url, words):
    with pytest.raises(ModelNotFound, match=words):
        parse_file_url(url)


@pytest.fixture
def site(monkeypatch, tmp_path):
    """`LocalHub`'s CDN, which is a web server as any, and an empty cache."""
    files = {FILE: b"GGUF" + bytes(3_000_000), PARTS[0]: b"GGUF 1", PARTS[1]: b"GGUF 2"}
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 20)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _s: None)
    with LocalHub({"a": files}).serving() as hub:
        hub.site = f"{hub.cdn_url}/a/raw/"
        yield hub


def fetch(url):
    return fetch_url(parse_file_url(url), report=lambda _line: None)


def test_a_file_at_an_address_is_resumed_by_the_next_try_and_found_again(site):
    url, data = site.site + FILE, site.repos["a"][FILE]
    site.faults[FILE] = [None, "cut", 404]  # first its version is asked for
    with pytest.raises(DownloadFailed, match=r"m-Q8_0.gguf could not be fetched: .*404.*kept for"):
        fetch(url)
    told = []
    path = locate_model(url, option="NAME", report=print, progress=lambda *n: told.append(n)).path
    assert path.read_bytes() == data
    assert site.gets_of(FILE)[-1][2] == "bytes=1048576-"
    assert told[-1] == (len(data), len(data), "")
    num_asked = len(site.asked)
    assert fetch(url) == path
    assert len(site.asked) == num_asked
    assert list(fetched_urls()) == [FileUrl(url)]
    assert list(path.parent.glob("*.incomplete")) == []


def test_a_file_that_was_changed_is_not_joined_with_what_is_here_of_the_old_one(site):
    site.faults[FILE] = [None, "cut", 404]
    with pytest.raises(DownloadFailed):
        fetch(site.site + FILE)
    site.repos["a"][FILE] = b"GGUF" + bytes([1]) * 3_000_000
    assert fetch(site.site + FILE).read_bytes() == site.repos["a"][FILE]


def test_all_parts_of_a_file_are_fetched(site):
    path = fetch(site.site + PARTS[0])
    assert [each.read_bytes() for each in sorted(path.parent.iterdir())] == [b"GGUF 1", b"GGUF 2"]


def test_a_digest_is_checked_of_what_comes_and_of_what_is_here(site):
    url, digest = site.site + FILE, hashlib.sha256(site.repos["a"][FILE]).hexdigest()
    with pytest.raises(DownloadFailed, match="not the expected file: 3000004 bytes with SHA-256"):
        fetch(f"{url}#sha256={'0' * 64}")
    path = fetch(f"{url}#sha256={digest.upper()}")
    path.write_bytes(b"GGUF of others")
    assert fetch(url) == path
    assert fetch(f"{url}#sha256={digest}").read_bytes() == site.repos["a"][FILE]


def test_a_file_without_the_right_to_read_it_names_the_user_who_needs_it():
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/cache/a.gguf")
    assert unreadable(denied) == (
        "/cache/a.gguf cannot be read: Permission denied; "
        f"let user {os.getuid()} read it, and enter its folders"
    )
    assert unreadable(OSError(errno.EIO, "I/O error"), "b").endswith("I/O error; check the file")
