"""Streams of servers with OpenAI's or Ollama's API over HTTP/1.1: as little work as can be."""

import asyncio
import json
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from httptools import HttpParserError, HttpResponseParser

from frontend.load.requests import Prompt

_PROBE_S = 5.0
_MOST_BYTES = 2**16
_decode = msgspec.json.Decoder().decode
ENDPOINTS = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "ollama": "/api/generate",
    "ollama-chat": "/api/chat",
}


class ServerError(Exception):
    """The answer is not a whole stream of tokens. `kind` is what such failures are counted by."""

    def __init__(self, text: str, kind: str = "broken stream") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Server:
    """An address and what its requests carry. `path` stands before the endpoint, `api` is a key of
    ENDPOINTS, `tls` None for http, else whether certificates are checked. `extra_body`: fields
    besides model, prompt and length; None leaves one out that would be there."""

    host: str
    port: int
    path: str
    model: str
    api: str = "openai"
    endpoint: str = ENDPOINTS["openai"]
    tls: bool | None = None
    headers: tuple[tuple[str, str], ...] = ()
    extra_body: Mapping[str, Any] = field(
        default_factory=lambda: {"temperature": 0, "ignore_eos": True}
    )

    @classmethod
    def at(cls, url: str, **fields: Any) -> "Server":
        """Raises ValueError: no http:// or https:// address."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{url!r} is not an http:// or https:// address, such as http://127.0.0.1:8000"
            )
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        port = parts.port or (443 if is_tls else 80)
        return cls(parts.hostname, port, base, "", **{"tls": is_tls or None, **fields})

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'' if self.tls is None else 's'}://{host}:{self.port}{self.path}"

    @property
    def is_ollama(self) -> bool:
        return self.api.startswith("ollama")

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        if self.tls is None:
            return None
        return ssl.create_default_context() if self.tls else ssl._create_unverified_context()

    def is_ready(self) -> bool:
        """Whether it says that it takes requests: /health, or where there is none, /v1/models."""
        status = self._status("/health")
        return (self._status("/v1/models") if status == 404 else status) == 200

    def check_reachable(self) -> None:
        """Raises ServerError: nothing listens at its address."""
        try:
            socket.create_connection((self.host, self.port), _PROBE_S).close()
        except OSError as error:
            raise ServerError(f"nothing answers at {self.url} ({error}); is it up?") from error

    def first_model(self) -> str:
        """The name of the first model that it serves. Raises ServerError: it does not say."""
        path = "/api/tags" if self.is_ollama else "/v1/models"
        try:
            with self._get(path) as answer:
                found = json.load(answer)
            return str(found["models"][0]["name"] if self.is_ollama else found["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"{self.url}{path} does not name a model ({type(error).__name__}: {error}); "
                "is the server up? else give --model"
            ) from error

    def request(self, prompt: Prompt, num_output_tokens: int) -> bytes:
        """The bytes of one request."""
        name = "messages" if self.api.endswith("chat") else "prompt"
        body: dict[str, Any] = {"model": self.model, name: prompt, "stream": True}
        if self.is_ollama:
            given = dict(self.extra_body)
            options = {"num_predict": num_output_tokens, "temperature": given.pop("temperature", 0)}
            body |= given | {"options": options | given.get("options", {})}
        else:
            body |= {"max_tokens": num_output_tokens, "stream_options": {"include_usage": True}}
            body |= self.extra_body
        data = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
        head = [
            f"POST {self.path}{self.endpoint} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join([*head, "", ""]).encode() + data

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=dict(self.headers))
        return urllib.request.urlopen(request, timeout=_PROBE_S, context=self.tls_context)

    def _status(self, path: str) -> int:
        try:
            with self._get(path) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


class Event(NamedTuple):
    """`num_tokens` is 1 for an event that brings tokens: how many there were is in the last
    event's counts, None where the server does not count."""

    num_tokens: int = 0
    text: str = ""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None


class _Answer:
    """What is parsed of one answer. `data`: the part of its body that nobody has taken yet."""

    def __init__(self) -> None:
        self.parser = HttpResponseParser(self)
        self.data = b""
        self.is_complete = self.keeps_open = False

    def on_body(self, data: bytes) -> None:
        self.data += data

    def on_message_complete(self) -> None:
        self.is_complete, self.keeps_open = True, self.parser.should_keep_alive()


_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Connections:
    """Connections to one server; they stay open between requests."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tls = server.tls_context
        self._idle: list[_Connection] = []

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def events(self, prompt: Prompt, num_output_tokens: int) -> AsyncIterator[Event]:
        """The events of one answer as they come. Raises ServerError: a status other than 200, an
        event that tells of an error, broken framing, or an end before the answer's; OSError: the
        connection failed."""
        request = self._server.request(prompt, num_output_tokens)
        parse = _ollama_event if self._server.is_ollama else _openai_event
        is_whole = False
        try:
            async for line in self._lines(request):
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    is_whole = True
                elif data and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                    found = _decode(data)
                    if found.get("error"):
                        raise ServerError(str(found["error"])[:300], "error in the stream")
                    event, is_last = parse(found)
                    is_whole |= is_last
                    yield event
        except (ValueError, AttributeError, TypeError, HttpParserError) as error:
            raise ServerError(f"the answer is no stream of tokens: {error}") from error
        if not is_whole:
            raise ServerError("the stream ended before the answer did")

    async def _lines(self, request: bytes) -> AsyncIterator[bytes]:
        (reader, writer), data = await self._send(request)
        answer = _Answer()
        try:
            while data:
                answer.parser.feed_data(data)
                if answer.parser.get_status_code() == 200:
                    # an event may be spread over chunks, a chunk may hold several
                    *lines, answer.data = answer.data.split(b"\n")
                    for line in lines:
                        yield line
                data = b"" if answer.is_complete else await reader.read(_MOST_BYTES)
            if (status := answer.parser.get_status_code()) != 200:
                text = answer.data.decode(errors="replace").strip()
                raise ServerError(f"status {status}: {text[:300]}", f"HTTP {status}")
            yield answer.data
        finally:
            if answer.keeps_open:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _send(self, request: bytes) -> tuple[_Connection, bytes]:
        """The connection, and how its answer begins."""
        while True:
            is_reused = bool(self._idle)
            reader, writer = connection = (
                self._idle.pop()
                if is_reused
                else await asyncio.open_connection(
                    self._server.host, self._server.port, ssl=self._tls
                )
            )
            try:
                writer.write(request)
                await writer.drain()
                if data := await reader.read(_MOST_BYTES):
                    return connection, data
            except BaseException as error:
                writer.close()
                if not (is_reused and isinstance(error, ConnectionError)):
                    raise
            writer.close()
            # the server may close what was idle for long; what is new must answer
            if not is_reused:
                raise ServerError("the server closed the connection without an answer")


def _openai_event(found: dict[str, Any]) -> tuple[Event, bool]:
    """A token whose text is still held back comes with neither text nor reason; the event that
    only names the role of a chat's answer, or the reason, brings none."""
    num_tokens, text, is_last = 0, "", False
    for choice in found.get("choices") or ():
        delta = choice.get("delta") or choice
        said = delta.get("content") or delta.get("text") or ""
        unsaid = any(delta.get(name) for name in ("reasoning_content", "reasoning", "tool_calls"))
        is_last |= (reason := choice.get("finish_reason")) is not None
        num_tokens += bool(said or unsaid or (reason is None and "role" not in delta))
        text += said
    usage = found.get("usage") or {}
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    num_prompt, num_output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Event(num_tokens, text, num_prompt, num_cached, num_output), is_last


def _ollama_event(found: dict[str, Any]) -> tuple[Event, bool]:
    said = found.get("message") or found
    text = said.get("content") or said.get("response") or ""
    has_token = bool(text or said.get("thinking") or said.get("tool_calls"))
    counts = found.get("prompt_eval_count"), None, found.get("eval_count")
    return Event(int(has_token), text, *counts), bool(found.get("done"))
