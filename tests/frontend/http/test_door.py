"""Who is answered, how much is taken, and what is logged, over real sockets."""

import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from http_server import complete, key_file, serving

from frontend import async_llm, shared_threads
from frontend.errors import InvalidInput
from frontend.http.api_keys import read_key_file
from frontend.http.exchange import Exchange
from frontend.http.settings import ServerSettings
from frontend.text import chat_template, template_process


@contextlib.contextmanager
def streaming(url, headers=None, **fields):
    """A request that goes on until it is left."""
    body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        chunks = response.iter_raw()  # closes the response when it is dropped
        next(chunks)
        yield response


def bearer(key):
    return {"authorization": f"Bearer {key}"}


# keys


def test_without_a_valid_key_nothing_is_answered_but_health(engine):
    wrong = [bearer("wrong"), {"x-api-key": ""}, {"authorization": "Basic secret"}, {}]
    closed = ["/v1/models", "/v1/nothing", "/openapi.json", "/props", "/slots", "/metrics"]
    with serving(engine.address, api_key=("first", "secret")) as url, httpx.Client() as http:
        for headers in wrong:
            assert complete(url, headers=headers).status_code == 401
            assert http.get(f"{url}/health", headers=headers).status_code == 200
        for path in [*closed, "/pages", "/health/", "//health", "/healthy"]:
            refusal = http.get(url + path, headers=headers)
            assert refusal.status_code == 401
            assert refusal.json()["error"]["type"] == "authentication_error"
            assert refusal.headers["www-authenticate"] == "Bearer"
        assert not engine.requests
        for headers in (bearer("secret"), {"x-api-key": "secret"}):  # any of the keys
            assert complete(url, headers=headers).status_code == 200


def test_the_key_of_the_environment_is_the_one_that_vllm_reads(engine, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of the environment")
    with serving(engine.address) as url:
        assert complete(url).status_code == 401
        assert complete(url, headers=bearer("of the environment")).status_code == 200


def test_the_keys_name_is_the_tenant_and_its_priority_has_a_floor(engine, tmp_path):
    digest = hashlib.sha256(b"bobs").hexdigest()
    file = key_file(
        tmp_path,
        {"name": "ann", "key": "anns", "min_priority": 3},
        {"name": "bob", "sha256": digest},
    )
    with serving(engine.address, api_key_file=file) as url:
        complete(url, headers=bearer("anns"))
        complete(url, headers=bearer("anns"), priority=7, user="x")
        complete(url, headers=bearer("bobs"), priority=-2)
        refusal = complete(url, headers=bearer("anns"), priority=2)
    assert [(each.tenant, each.priority) for each in engine.requests] == [
        ("ann", 3),
        ("ann/x", 7),
        ("bob", -2),
    ]
    assert refusal.status_code == 403
    assert refusal.json()["error"]["param"] == "priority"


def test_a_toml_file_of_keys_is_read(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "ann"\nkey = "anns"\nadmin = true\n')
    file.chmod(0o600)
    (key,) = read_key_file(file)
    assert key.name == "ann"
    assert key.is_admin
    assert key.digest == hashlib.sha256(b"anns").digest()
    assert "anns" not in repr(key)
    assert str(key.digest) not in repr(key)


@pytest.mark.parametrize(
    ("entry", "mode", "words"),
    [
        ({"name": "a/b", "key": "k"}, 0o600, "regex"),
        ({"name": "a"}, 0o600, "either key or sha256"),
        ({"name": "a", "key": "k", "sha256": "0" * 64}, 0o600, "either key or sha256"),
        ({"name": "a", "key": "k", "limit": 3}, 0o600, "limit"),
        ({"name": "a", "key": "k", "max_concurrent_requests": 0}, 0o600, ">= 1"),
        ({"name": "a" * 65, "key": "k"}, 0o600, "regex"),
        ({"name": "", "key": "k"}, 0o600, "regex"),
        ({"name": "a" * 64, "key": "k"}, 0o644, "chmod 600"),
        ({"name": "a", "key": "k"}, 0o640, "chmod 600"),
        ({"name": "a", "key": "k"}, 0o602, "chmod 600"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_refused(tmp_path, entry, mode, words):
    with pytest.raises(InvalidInput, match=words):
        read_key_file(key_file(tmp_path, entry, mode=mode))


@pytest.mark.parametrize(
    ("mode", "owner", "user", "is_read"),
    [
        (0o440, 0, 10001, True),  # as Kubernetes mounts a secret for a pod with an fsGroup
        (0o400, 0, 10001, True),
        (0o460, 0, 10001, False),
        (0o444, 0, 10001, False),
        (0o440, 10001, 10001, False),
        (0o440, 0, 0, False),
    ],
)
def test_a_group_may_read_keys_only_in_a_file_of_roots(
    tmp_path, monkeypatch, mode, owner, user, is_read
):
    file = key_file(tmp_path, {"name": "a", "key": "k"}, mode=mode)
    of_file = SimpleNamespace(st_mode=stat.S_IFREG | mode, st_uid=owner)
    monkeypatch.setattr(Path, "stat", lambda _self: of_file)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with contextlib.nullcontext() if is_read else pytest.raises(InvalidInput, match="chmod 600"):
        assert read_key_file(file)[0].name == "a"


def test_a_caller_owns_what_it_and_its_users_sent():
    tenants = ["ann", "ann/x", "anna", "an", "", None, "bob/ann"]
    assert [Exchange(caller="ann").owns(tenant) for tenant in tenants] == [True] * 2 + [False] * 5


def test_a_broken_file_of_keys_does_not_show_its_keys(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text('{"keys": [{"name": "a", "key": "very secret" oops')
    file.chmod(0o600)
    with pytest.raises(InvalidInput) as caught:
        read_key_file(file)
    assert "very secret" not in str(caught.value)


def test_hashes_may_be_read_by_others(tmp_path):
    entry = {"name": "a", "sha256": "AB" * 32}
    assert read_key_file(key_file(tmp_path, entry, mode=0o644))[0].digest == b"\xab" * 32


# limits


def test_a_key_has_its_own_limit_of_requests_at_once(start_engine, tmp_path):
    engine = start_engine(step_s=0.02)
    file = key_file(
        tmp_path,
        {"name": "ann", "key": "anns", "max_concurrent_requests": 1},
        {"name": "bob", "key": "bobs"},
    )
    with serving(engine.address, api_key_file=file) as url:
        with streaming(url, bearer("anns")):
            refusal = complete(url, headers=bearer("anns"))
            assert refusal.status_code == 429
            assert "'ann' has 1 requests running" in refusal.json()["error"]["message"]
            assert int(refusal.headers["retry-after"]) >= 1
            assert complete(url, headers=bearer("bobs")).status_code == 200
        assert status_within_5_s(lambda: complete(url, headers=bearer("anns"))) == 200


def status_within_5_s(ask):
    """The server notices within a moment that a reader left."""
    deadline_s = time.monotonic() + 5
    while (status := ask().status_code) == 429 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return status


def test_a_key_has_its_own_limit_of_requests_a_minute(engine, tmp_path):
    file = key_file(tmp_path, {"name": "ann", "key": "anns", "requests_per_minute": 2})
    with serving(engine.address, api_key_file=file) as url:
        found = [complete(url, headers=bearer("anns")) for _ in range(3)]
    assert [each.status_code for each in found] == [200, 200, 429]
    assert 20 <= int(found[-1].headers["retry-after"]) <= 30


def test_a_key_saves_up_no_more_than_a_minute_of_requests(engine, tmp_path, monkeypatch):
    now_s = time.monotonic()
    monkeypatch.setattr("frontend.http.door.time", SimpleNamespace(monotonic=lambda: now_s))
    file = key_file(tmp_path, {"name": "ann", "key": "anns", "requests_per_minute": 2})
    with serving(engine.address, api_key_file=file) as url:
        assert complete(url, headers=bearer("anns")).status_code == 200
        now_s += 600
        found = [complete(url, headers=bearer("anns")).status_code for _ in range(3)]
        assert found == [200, 200, 429]
        now_s += 29
        assert complete(url, headers=bearer("anns")).status_code == 429
        now_s += 1.01
        assert complete(url, headers=bearer("anns")).status_code == 200


def test_the_server_has_a_limit_of_requests_at_once_and_health_has_none(start_engine):
    engine = start_engine(step_s=0.02)
    with serving(engine.address, max_concurrent_requests=1) as url, streaming(url):
        assert complete(url).status_code == 429
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_and_the_connection_goes_on(engine, is_chunked):
    body = json.dumps({"prompt": "x" * 300_000}).encode()
    chunks = (body[start : start + 50_000] for start in range(0, len(body), 50_000))
    with serving(engine.address, max_body_size=100_000) as url, httpx.Client() as http:
        sent = chunks if is_chunked else body
        refusal = http.post(f"{url}/v1/completions", content=sent)
        assert refusal.status_code == 413
        assert "the limit is 100000" in refusal.json()["error"]["message"]
        assert http.get(f"{url}/health").status_code == 200
    assert not engine.requests


def test_a_body_of_just_the_limit_is_taken(engine):
    body = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        with serving(engine.address, max_body_size=limit) as url:
            headers = {"content-type": "application/json"}
            answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers)
            assert answer.status_code == status


# pages of the web


def test_a_page_of_the_web_may_not_use_a_server_without_keys(engine):
    with serving(engine.address, cors_origin=("https://chat.example",)) as url:

        def status(**headers):
            return httpx.get(f"{url}/v1/models", headers=headers).status_code

        assert status(origin="https://evil.example") == 403
        assert status(origin="null") == 403
        assert status(host="evil.example") == 403
        assert status(origin="http://evil.example", host="evil.example") == 403
        assert status(origin="https://chat.example") == 200
        assert status(origin="http://localhost:3000") == 200
        assert status(origin="app://obsidian.md") == 200
        assert status(host="localhost:8000") == 200


def test_an_allowed_origin_may_ask_and_read(engine):
    origin = "https://chat.example"
    with serving(engine.address, cors_origin=(origin,), api_key=("secret",)) as url:
        asks = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        preflight = httpx.options(f"{url}/v1/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        answer = complete(url, headers={"origin": origin, **bearer("secret")})
        assert answer.headers["access-control-allow-origin"] == origin
        refusal = complete(url, headers={"origin": origin})
        assert refusal.status_code == 401
        assert refusal.headers["access-control-allow-origin"] == origin


# who asks


def test_a_proxy_names_the_caller_only_if_it_is_trusted(engine):
    headers = {"x-forwarded-for": "203.0.113.9"}
    with serving(engine.address) as url:
        complete(url, headers=headers)
    with serving(engine.address, forwarded_allow_ips="127.0.0.1") as url:
        complete(url, headers=headers)
    assert [each.tenant for each in engine.requests] == ["127.0.0.1", "203.0.113.9"]


def test_a_request_id_comes_back_and_reaches_the_engine(engine):
    with serving(engine.address) as url:
        answer = complete(url, headers={"x-request-id": "trace-7"})
        assert answer.headers["x-request-id"] == "trace-7"
        assert answer.json()["id"] == "cmpl-trace-7"
        assert engine.requests[0].request_id.startswith("trace-7-")
        drawn = complete(url)
        assert drawn.json()["id"] == f"cmpl-{drawn.headers['x-request-id']}"
        assert httpx.get(f"{url}/v1/nothing").headers["x-request-id"]
        bad = complete(url, headers={"x-request-id": "x" * 129})
        assert bad.status_code == 400
        assert len(bad.headers["x-request-id"]) < 128


def test_one_request_id_may_be_used_by_two_at_once(start_engine):
    engine = start_engine(step_s=0.02)
    headers = {"x-request-id": "same"}
    with serving(engine.address) as url, streaming(url, headers):
        assert complete(url, headers=headers).status_code == 200


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_access_log_has_numbers_and_names_but_no_text_or_key(engine, log_format, caplog):
    caplog.set_level(logging.INFO, "frontend.http.access")
    with serving(engine.address, api_key=("secret",), access_log=log_format) as url:
        headers = {**bearer("secret"), "x-request-id": "trace-7"}
        complete(url, "a private prompt", headers)
        httpx.get(f"{url}/v1/models?token=secret", headers={"x-api-key": "guess"})
    first, second = (
        record.getMessage() for record in caplog.records if record.name == "frontend.http.access"
    )
    if log_format == "json":
        found = json.loads(first)
        assert list(found)[:5] == ["time", "level", "logger", "message", "pid"], "as all lines"
        assert abs(datetime.fromisoformat(found["time"]).timestamp() - time.time()) < 60
        assert found["status"] == 200
        assert found["caller"] == "api-key"
        assert (found["prompt_tokens"], found["output_tokens"]) == (16, 5)
    else:
        assert abs(time.mktime(time.strptime(first[:19], "%Y-%m-%d %H:%M:%S")) - time.time()) < 60
    for words in ("trace-7", "/v1/completions", "200", "api-key"):
        assert words in first
    assert "401" in second
    for secret in ("secret", "guess", "private"):
        assert secret not in first + second


# settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "--insecure"),
        ({"host": "::"}, "--insecure"),
        ({"host": "no.such.host.invalid"}, "no address"),
        ({"port": 70_000}, "0 to 65535"),
        ({"max_body_size": 0}, "--max-body-size is 0"),
        ({"request_timeout": float("inf")}, "--request-timeout is inf"),
        ({"api_key": ("",)}, "--api-key is empty"),
        ({"api_key": ("a", "a")}, "same API key"),
        ({"ssl_keyfile": "x.pem"}, "--ssl-certfile"),
        ({"ssl_certfile": "/nothing.pem"}, "No such file"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(InvalidInput, match=words):
        ServerSettings(**settings).check()


def test_another_host_needs_a_key_or_a_word():
    for more in ({"insecure": True}, {"api_key": ("k",)}):
        ServerSettings(host="0.0.0.0", **more).check()


# the making of prompts


def test_templates_of_one_key_wait_for_each_other_up_to_a_limit_and_hold_up_no_other(
    engine, tmp_path, monkeypatch
):
    threads = shared_threads.SharedThreads("chat templates that requests bring", 2, 1)
    monkeypatch.setattr(async_llm, "REQUEST_TEMPLATES", threads)
    limits = msgspec.structs.replace(template_process.LIMITS, cpu_s=0.3)
    monkeypatch.setattr(template_process, "LIMITS", limits)
    renderers = template_process.TemplateRenderers(2, "omit it")
    monkeypatch.setattr(chat_template, "request_renderers", renderers)
    keys = [{"name": name, "key": name} for name in ("ann", "bob")]
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

    def chat(key, **fields):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers=bearer(key), timeout=30
        )
        return answer.status_code, answer.json().get("error", {}).get("message", "")

    with serving(engine.address, api_key_file=key_file(tmp_path, *keys)) as url:
        with ThreadPoolExecutor() as pool:
            loops = [pool.submit(chat, "ann", chat_template=loop) for _ in range(3)]
            assert chat("bob", chat_template="{{ messages[0].content }}")[0] == 200
            assert not all(each.done() for each in loops)
        renderers.close()
    statuses, texts = zip(*sorted(each.result() for each in loops), strict=True)
    assert statuses == (400, 400, 429)
    assert "more than 0.3 s of processor time" in texts[0]
    assert "1 requests of 'ann' wait for chat templates that requests bring" in texts[2]
