"""Files by URL: which hosts, which of their addresses, and what of an answer is taken."""

import socket
import time

import pytest
from file_server import FileServer

from frontend.errors import InvalidInput
from frontend.multimodal import fetching
from frontend.multimodal.fetching import MediaHost, fetch

OK = b"HTTP/1.1 200 OK\r\n"


def fetched(url, *hosts, seconds=5.0, max_bytes=1000):
    named = [MediaHost.of(each) for each in hosts]
    return fetch(url, "image 0", named, seconds=seconds, max_bytes=max_bytes)


def answered(*pieces, **limits):
    with FileServer(*pieces, pause_s=limits.pop("pause_s", 0.0)) as server:
        host = f"127.0.0.1:{server.port}"
        data = fetched(f"http://{host}/a b.png?x=é".replace(" b", "%20b"), host, **limits)
    assert server.asked[0].startswith("GET /a%20b.png?x=%C3%A9 HTTP/1.1\r\nHost: " + host)
    return data


@pytest.mark.parametrize(
    "pieces",
    [
        [OK + b"Content-Length: 3\r\n\r\n", b"a", b"bc"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n"],
        [OK + b"\r\nab", b"c"],
        [b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 3\r\n\r\nab", b"c"],
        [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK + b"Content-Length: 3\r\n\r\nabc"],
    ],
)
def test_a_file_of_a_named_host_is_fetched(pieces):
    assert answered(*pieces, pause_s=0.01) == b"abc"


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([OK + b"Content-Length: 1001\r\n\r\n"], "more bytes than 1000, the limit"),
        ([OK + b"\r\n", b"x" * 1001], "more bytes than 1000, the limit"),
        ([OK + b"X: " + b"x" * 70_000], "more bytes than 1000, the limit"),
        ([b"HTTP/1.1 302 Found\r\nLocation: /b\r\n\r\n"], "status 302, a redirect, and none is"),
        ([b"HTTP/1.1 404 Not Found\r\n\r\n"], "status 404; send another URL, or the file itself"),
        ([OK + b"Content-Length: 3\r\n\r\nab"], "ends too early"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"], "ends too early"),
        ([b""], "ends too early"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "send another URL, or the file itself"),
    ],
)
def test_another_answer_is_refused_by_host_and_limit(pieces, words):
    with pytest.raises(InvalidInput, match=f"image 0 cannot be fetched from 127.0.0.1:.*{words}"):
        answered(*pieces)


def test_a_slow_host_has_no_more_than_the_seconds_in_all():
    drops = [OK, *(b"X: y\r\n" for _ in range(50))]
    began = time.monotonic()
    with pytest.raises(InvalidInput, match="took more than the 10 s that a prompt's files have"):
        answered(*drops, pause_s=0.1, seconds=0.3)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.org/x", "at example.org:80, .*hosts that --allow-media-url"),
        ("http://images.org.evil.com/x", "at images.org.evil.com:80"),
        ("http://notimages.org/x", "at notimages.org:80"),
        ("http://wild.org/x", "at wild.org:80"),
        ("http://images.org:8080/x", "at images.org:8080"),
        ("http://other.org/x", "at other.org:80"),
        ("http://127.0.0.1/x", "at 127.0.0.1:80"),
        ("http://2130706433/x", "at 2130706433:80"),
        ("http://[::ffff:127.0.0.1]/x", "at ::ffff:7f00:1:80|at ::ffff:127.0.0.1:80"),
        ("http://user:pass@images.org/x", "has credentials"),
        ("http://images.org\\@evil.com/x", "has credentials"),
        ("http://images.org/a b", "has spaces or control characters"),
        ("http://images.org/a\r\nHost: evil", "has spaces or control characters"),
        ("http://images.org:port/x", "not fetched: Port"),
        ("http://images.org/" + "x" * 8192, "has 8210 characters, the limit is 8192"),
        ("http:///x", "at :80"),
    ],
)
def test_other_hosts_are_refused_before_they_are_looked_up(url, words, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(InvalidInput, match=words):
        fetched(url, "images.org", "*.wild.org", "other.org:8080")


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"], ["10.1.2.3"], ["169.254.169.254"], ["100.64.0.1"], ["224.0.0.1"],
        ["0.0.0.0"], ["::1"], ["::ffff:10.0.0.1"], ["::10.0.0.1"], ["fe80::1%eth0"], ["fc00::1"],
        ["ff02::1"], ["2002:a00:1::"], ["2001:0:1::"], ["64:ff9b::a00:1"],
        ["93.184.216.34", "127.0.0.1"],
    ],
)  # fmt: skip
def test_a_named_host_at_an_address_that_is_not_public_is_refused(addresses, monkeypatch):
    """Whoever has the name may have it lead into the operator's network."""
    found = [(0, 0, 0, "", (each, 80)) for each in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", None)
    for host in ("images.org", "a.b.wild.org"):
        with pytest.raises(InvalidInput, match=f"its address {addresses[-1]} is not public"):
            fetched(f"http://{host}/x", "images.org", "*.wild.org")


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """A name that is looked up again may lead elsewhere; the next address is tried for one that
    does not answer."""
    asked, connected = [], []

    def look_up(host, port, **_):
        asked.append(host)
        public = ["93.184.216.34", "64:ff9b::808:808", "2606:4700::1111"]
        return [(0, 0, 0, "", (each, port)) for each in public]

    def connect(address, timeout):
        connected.append(address)
        if len(connected) == 1:
            raise ConnectionRefusedError(111, "refused")
        ours, theirs = socket.socketpair()
        theirs.sendall(OK + b"Content-Length: 1\r\n\r\nx")
        kept.append(theirs)
        return ours

    kept = []
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert fetched("http://Images.ORG./x", "images.org") == b"x"
    assert asked == ["images.org"]
    assert connected == [("93.184.216.34", 80), ("64:ff9b::808:808", 80)]
    kept[0].close()


def test_no_proxy_of_the_environment_is_used(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert answered(OK + b"Content-Length: 1\r\n\r\nx") == b"x"


def test_https_is_checked_by_the_hosts_name(monkeypatch):
    with (
        FileServer(b"no TLS") as server,
        pytest.raises(InvalidInput, match=r"be fetched from localhost:.*SSL"),
    ):
        fetched(f"https://localhost:{server.port}/x", f"localhost:{server.port}")
    context = fetching.tls_context()
    assert context.check_hostname and context.verify_mode == 2


@pytest.mark.parametrize(
    "text", ["", "*", "https://images.org", "a b", "images.org/x", "a@b", "images.org:x", "a..b"]
)
def test_what_is_no_host_ends_the_start(text):
    with pytest.raises(InvalidInput, match=r"allow_media_url is .*must be a host such as images"):
        MediaHost.of(text)


def test_hosts_are_compared_as_the_network_writes_them():
    assert MediaHost.of("::1") == MediaHost.of("[0:0::1]") == MediaHost("::1", None)
    assert MediaHost.of("[::1]:80") == MediaHost("::1", 80)
    assert MediaHost.of("BÜCHER.example") == MediaHost("xn--bcher-kva.example", None)
    assert not MediaHost.of("*.0.0.1").allows("127.0.0.1", 80)
    assert MediaHost.of("*.wild.org").allows("a.b.wild.org", 443)
