"""Who is answered, how much is taken, and what is logged, over real sockets."""

import contextlib
import hashlib
import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from fake_engine import wait_until
from http_server import key_file, serving

from frontend import async_llm, shared_threads
from frontend.errors import InvalidInput
from frontend.http.api_keys import read_key_file
from frontend.http.connections import LimitedConnection
from frontend.http.exchange import Exchange
from frontend.http.settings import ServerSettings
from frontend.text import chat_template, template_process


def complete(url, prompt="Hello", headers=None, **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 5, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=20)


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


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def posted(head=HEAD, **fields):
    """The bytes of a request."""
    body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, **fields}
    data = json.dumps(body).encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def raw(url, *parts, pause_s=0.0):
    """What the server answers to these bytes, until it closes the connection."""
    with connected(url) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
            while data := connection.recv(65536):
                answer += data
    return answer


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


def test_connections_beyond_the_limit_are_closed_at_once(engine, monkeypatch):
    with serving(engine.address) as url, contextlib.ExitStack() as opened:
        monkeypatch.setattr(LimitedConnection, "max_connections", 2)
        first, second, third = (opened.enter_context(connected(url)) for _ in range(3))
        with contextlib.suppress(ConnectionResetError):
            assert third.recv(1) == b""
        for one in (first, second):
            one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one.recv(100).startswith(b"HTTP/1.1 200")


def test_a_request_that_comes_too_slowly_is_ended(engine):
    with serving(engine.address, request_timeout=0.3) as url:
        assert raw(url, HEAD).startswith(b"HTTP/1.1 408")
        assert raw(url) == b""
        assert raw(url, *[b"\r\n"] * 8, pause_s=0.1) == b""
        body = [HEAD + b"Content-Length: 500\r\n\r\n", *[b" "] * 8]
        assert raw(url, *body, pause_s=0.1) == b""
        assert complete(url).status_code == 200
    LimitedConnection.request_timeout_s = 60.0


def test_an_answer_may_take_longer_than_a_request(start_engine):
    engine = start_engine(step_s=0.05)
    sent = posted(HEAD + b"Connection: close\r\n", max_tokens=20)
    with serving(engine.address, request_timeout=0.3) as url:
        assert raw(url, sent, b"\r\n").startswith(b"HTTP/1.1 200")
    LimitedConnection.request_timeout_s = 60.0


def test_a_client_that_leaves_within_its_request_is_no_fault(engine, caplog):
    caplog.set_level(logging.INFO, "frontend.http.access")
    with serving(engine.address, access_log="text") as url:
        with connected(url) as connection:
            connection.sendall(HEAD + b"Content-Length: 500\r\n\r\n")
            time.sleep(0.1)
        wait_until(lambda: "status=499" in caplog.text)
    assert "Traceback" not in caplog.text


def test_a_client_that_leaves_ends_what_it_has_pipelined_too(start_engine, caplog):
    """The one that is answered, and those behind it that have not begun."""
    engine = start_engine(step_s=0.02)
    with serving(engine.address) as url:
        with connected(url) as connection:
            connection.sendall(2 * posted(stream=True))
            assert connection.recv(100)
            wait_until(lambda: engine.num_live)
        wait_until(lambda: not engine.num_live)
        assert len(engine.aborted) == len(engine.requests)
        assert complete(url).status_code == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        (b"x-y: " + b"z" * 400_000, b"larger than 65536 bytes"),  # without end
        (b"x-y: " + b"z" * 66_000 + b"\r\n\r\n", b"larger than 65536 bytes"),
        (b"a: b\r\n" * 300 + b"\r\n", b"more than 256 headers"),
    ],
)
def test_a_head_that_is_too_large_is_refused(engine, rest, why):
    with serving(engine.address) as url:
        answer = raw(url, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", rest)
        if answer or len(rest) < 10_000:  # or the reset came first
            assert answer.startswith(b"HTTP/1.1 431") and why in answer
        assert complete(url).status_code == 200


@pytest.mark.parametrize("endless", [b"x: y\r\n" * 99, b"x" * 500, b"1;" + b"e" * 500])
def test_what_stands_behind_a_chunk_has_the_limit_of_a_head(engine, endless):
    head = HEAD + b"Transfer-Encoding: chunked\r\n"
    is_trailer = not endless.startswith(b"1;")
    with serving(engine.address) as url:
        with connected(url) as connection:
            connection.sendall(head + b"\r\n1\r\n{\r\n" + b"0\r\n" * is_trailer)
            with contextlib.suppress(OSError):
                for _ in range(4000):
                    connection.sendall(endless)
                    endless = endless.removeprefix(b"1;")
                pytest.fail("2 MB were taken")
        assert complete(url).status_code == 200


def test_trailers_are_left_out(engine):
    body = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    head = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"%x\r\n%s\r\n0\r\nx-checksum: 1\r\n\r\n" % (len(body), body)
    with serving(engine.address) as url:
        answer = raw(url, head + chunks)
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_http_1_0_ends_with_its_connection(engine, stream):
    sent = posted(HEAD.replace(b"1.1", b"1.0"), max_tokens=3, stream=stream)
    with serving(engine.address) as url:
        answer = raw(url, sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.startswith(b"data: {" if stream else b"{")
    assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")


def test_what_is_no_http_ends_only_its_connection(engine):
    with serving(engine.address) as url:
        assert raw(url, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert complete(url).status_code == 200


def test_a_client_that_reads_nothing_keeps_nobody_waiting(start_engine):
    engine = start_engine(step_s=0.002)
    with serving(engine.address) as url:
        host, port = url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as connections:
            for _ in range(8):
                slow = socket.socket()
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                connections.enter_context(slow)
                slow.connect((host, int(port)))
                slow.sendall(posted(max_tokens=500, stream=True))
            assert complete(url).status_code == 200
            wait_until(lambda: len(engine.requests) == 9 and not engine.num_live, 20)


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
