"""A connection's limits and faults, in bytes over real sockets."""

import contextlib
import json
import logging
import socket
import time

import pytest
from fake_engine import wait_until
from http_server import complete, serving

from frontend.http.connections import LimitedConnection

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
