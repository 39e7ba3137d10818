"""Streams of an OpenAI-compatible server over plain HTTP/1.1: as little work as a client can do."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

_PROBE_S = 2.0


class ServerError(Exception):
    """The answer is not a stream of completions."""


@dataclass(frozen=True, slots=True)
class Server:
    """`model` is the name that requests carry."""

    host: str
    port: int
    path: str
    model: str

    @classmethod
    def at(cls, url: str) -> Server:
        """Raises ValueError: not an http:// address."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// address, such as http://127.0.0.1:8000")
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or 80, base, "")

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}{self.path}"

    def is_ready(self) -> bool:
        """Whether it says that it takes requests: /health, or where there is none, /v1/models."""
        status = self._status("/health")
        return (self._status("/v1/models") if status == 404 else status) == 200

    def first_model(self) -> str:
        """The name of the first model that it serves. Raises ServerError: it does not say."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=_PROBE_S) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"{self.url}/v1/models does not name a model ({type(error).__name__}: {error})"
            ) from error

    def _status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=_PROBE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


async def complete(
    server: Server, prompt_token_ids: Sequence[int], num_output_tokens: int
) -> AsyncIterator[dict[str, Any]]:
    """The events of one greedy completion that ignores end-of-sequence, as they come.

    Raises:
        ServerError: a status other than 200, an event that tells of an error, or broken framing.
        OSError: the connection failed.
    """
    body = json.dumps(
        {
            "model": server.model,
            "prompt": list(prompt_token_ids),
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST {server.path}/v1/completions HTTP/1.1\r\nHost: {server.host}:{server.port}\r\n"
        "Content-Type: application/json\r\nAccept: text/event-stream\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=2**20)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        async for line in _lines(reader):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServerError(str(event["error"])[:300])
            yield event
    except (ValueError, asyncio.IncompleteReadError) as error:
        raise ServerError(f"the answer broke off or is not HTTP: {error}") from error
    finally:
        writer.close()


def num_new_tokens(event: dict[str, Any]) -> int:
    """1 for an event that brings a token, 0 for the last one, which brings only the reason.

    A token whose text is still held back comes with no text and no reason.
    """
    return sum(
        bool(choice.get("text")) or choice.get("finish_reason") is None
        for choice in event.get("choices", ())
    )


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body's lines, chunked or not."""
    status = (await reader.readline()).split(maxsplit=2)
    headers = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    is_chunked = headers.get(b"transfer-encoding") == b"chunked"
    if len(status) < 2 or status[1] != b"200":
        text = (await reader.read(2000)).decode(errors="replace")
        raise ServerError(f"status {b' '.join(status[1:]).decode().strip()}: {text.strip()[:300]}")
    if not is_chunked:
        while line := await reader.readline():
            yield line
        return
    rest = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        # an event may be spread over chunks, a chunk may hold several
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            yield line
    if rest:
        yield rest
