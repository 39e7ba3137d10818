"""Files of http(s) URLs, from hosts that the operator named: straight from an address that was
checked, without redirects, proxies or credentials, within limits of bytes and seconds."""

import functools
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, urlsplit

from frontend.errors import InvalidInput

FETCH_S = 10.0
"""Seconds for all files that a prompt has fetched."""
_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
_HEAD_BYTES = 64 * 1024
_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # an IPv4 address in its last 32 bits, RFC 6052
_UNICAST = ipaddress.ip_network("2000::/3")
_6TO4 = ipaddress.ip_network("2002::/16")


@dataclass(frozen=True, slots=True)
class MediaHost:
    """Of `--allow-media-url`. `name`: a host, an address, or `*.` and the end of all names below a
    host; `port`: None for 80 and 443."""

    name: str
    port: int | None

    @classmethod
    def of(cls, text: str) -> "MediaHost":
        """Raises InvalidInput: neither HOST nor HOST:PORT."""
        try:
            parts = urlsplit(f"//[{text}]" if ":" in text and _ip(text) else f"//{text}")
            name, port = _plain_host(parts.hostname or ""), parts.port
            is_host = _ip(name) is not None or _HOST.fullmatch(name)
            if not is_host or "@" in text or parts.geturl() != f"//{parts.netloc}":
                raise ValueError
        except ValueError:
            raise InvalidInput(
                f"allow_media_url is {text!r:.200}, it must be a host such as images.example.org, "
                "*.example.org or 127.0.0.1:8080"
            ) from None
        return cls(name, port)

    def allows(self, host: str, port: int) -> bool:
        """Whether files of this host are fetched; not yet whether its address is one to reach."""
        is_port = port in _PORTS.values() if self.port is None else port == self.port
        if self.name.startswith("*."):
            return is_port and _ip(host) is None and host.endswith(self.name[1:])
        return is_port and host == self.name


def fetch(
    url: str, name: str, hosts: Sequence[MediaHost], *, seconds: float, max_bytes: int
) -> bytes:
    """What is at the URL. Blocks for at most so many seconds.

    Args:
        name: for errors.

    Raises:
        InvalidInput: the host is none of `hosts`, or its address not public; too many bytes or
            seconds; an answer other than 200, or none.
    """
    from httptools import HttpParserError

    parts, host, port = _checked_url(url, name, hosts)
    deadline = time.monotonic() + seconds
    try:
        with _connected(parts.scheme, host, port, deadline) as connection:
            return _answer(connection, parts, deadline, max_bytes)
    except TimeoutError:
        why = f"it took more than the {FETCH_S:g} s that a prompt's files have; send a smaller one"
    except (OSError, HttpParserError, UnicodeError) as error:
        why = (
            f"{getattr(error, 'strerror', None) or error or type(error).__name__}; send another URL"
        )
    except _Refused as error:
        why = str(error)
    raise InvalidInput(
        f"{name} cannot be fetched from {host}:{port}: {why:.300}, or the file itself"
    )


class _Refused(Exception):
    pass


def _checked_url(url: str, name: str, hosts: Sequence[MediaHost]) -> tuple[SplitResult, str, int]:
    """The URL, its host and port."""
    try:
        if len(url) > _MAX_URL_CHARS:
            raise ValueError(f"it has {len(url)} characters, the limit is {_MAX_URL_CHARS}")
        if any(char <= " " or char == "\x7f" for char in url):
            raise ValueError("it has spaces or control characters")
        parts = urlsplit(url)
        host, port = _plain_host(parts.hostname or ""), parts.port or _PORTS[parts.scheme]
        if "@" in parts.netloc:
            raise ValueError("it has credentials")
    except ValueError as error:
        raise InvalidInput(
            f"{name} is at {url[:100]!r}, which is not fetched: {error}; send another URL, or the "
            "file itself"
        ) from None
    if not any(each.allows(host, port) for each in hosts):
        raise InvalidInput(
            f"{name} is at {host}:{port}, and files are fetched only from hosts that "
            "--allow-media-url (allow_media_url) names; send the file itself, as a data URL "
            "(data:...;base64,...), or name the host there"
        )
    return parts, host, port


def _plain_host(host: str) -> str:
    """In ASCII, small letters, without a dot behind; addresses in their shortest form.
    Raises ValueError: no name of a host."""
    ip = _ip(host)
    return host.rstrip(".").encode("idna").decode().lower() if ip is None else str(ip)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _connected(scheme: str, host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first of the host's addresses that takes it; all of them are checked."""
    resolver = ThreadPoolExecutor(1)  # the system's has no limit of time
    try:
        looked_up = resolver.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(str(each[4][0]) for each in looked_up.result(_left(deadline))))
    finally:
        resolver.shutdown(wait=False)
    for address in found:
        if not _may_reach(address, host):
            raise _Refused(
                f"its address {address} is not public, and only --allow-media-url {address} would "
                "allow that; send another URL"
            )
    for index, address in enumerate(found):
        try:
            left = _left(deadline) / (len(found) - index)
            connection = socket.create_connection((address, port), timeout=left)
            break
        except OSError:
            if index == len(found) - 1:
                raise
    if scheme == "http":
        return connection
    try:
        connection.settimeout(_left(deadline))
        return tls_context().wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def _may_reach(address: str, host: str) -> bool:
    """Whether a host's address is public; an address that is the host itself was named outright."""
    ip = ipaddress.ip_address(address)
    if _ip(host) is not None:
        return ip == _ip(host)
    if host == "localhost":
        return ip.is_loopback
    if ip.version == 6:
        if ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip not in _UNICAST or ip in _6TO4:  # not of mapped or translated IPv4 addresses
            return False
    return ip.is_global and not ip.is_multicast


@functools.cache
def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Body:
    """What httptools calls; the last one of several answers counts, others are interim."""

    def on_message_begin(self) -> None:
        self.length: int | None = None
        self.is_chunked = self.is_complete = False
        self.data = bytearray()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-length":
            self.length = int(value)
        self.is_chunked |= name.lower() == b"transfer-encoding"

    def on_body(self, data: bytes) -> None:
        self.data += data

    def on_message_complete(self) -> None:
        self.is_complete = True


def _answer(
    connection: socket.socket, parts: SplitResult, deadline: float, max_bytes: int
) -> bytes:
    from httptools import HttpResponseParser

    target = quote(parts.path or "/", safe="/%:=&~+!$,;'@()*[]")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:=&?~+!$,;'@()*[]")
    head = (
        f"GET {target} HTTP/1.1\r\nHost: {parts.netloc.encode('idna').decode()}\r\n"
        "User-Agent: engine-core\r\nAccept: image/*, audio/*\r\nAccept-Encoding: identity\r\n"
        "Connection: close\r\n\r\n"
    )
    connection.settimeout(_left(deadline))
    connection.sendall(head.encode())
    body = _Body()
    body.on_message_begin()
    parser = HttpResponseParser(body)
    num_bytes = status = 0
    while not (body.is_complete and status == 200):
        connection.settimeout(_left(deadline))
        data = connection.recv(_HEAD_BYTES)
        num_bytes += len(data)
        parser.feed_data(data)
        status = parser.get_status_code()
        if status >= 200 and status != 200:
            what = ", a redirect, and none is followed" if 300 <= status < 400 else ""
            raise _Refused(f"the answer has status {status}{what}; send another URL")
        if max(body.length or 0, num_bytes - _HEAD_BYTES, len(body.data)) > max_bytes:
            raise _Refused(f"it has more bytes than {max_bytes}, the limit; send a smaller one")
        if not data:
            if status == 200 and body.length is None and not body.is_chunked:
                break
            raise _Refused("the answer ends too early; send another URL")
    return bytes(body.data)
