"""What the fuzzer sends. A case is made from a generator's name and a seed, which name it."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

MAX_BODY_BYTES = 16 << 20
"""The server's default limit; some bodies are longer."""
_WORDS = (
    "hello world ",
    "1",
    " ",
    "\n",
    "é",
    "日本語",
    "😀",
    "a",
    "the quick brown fox, ",
    "\0",
    "<|im_end|>",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """
    Attributes:
        data: the bytes of an HTTP request; empty if it is `frames`.
        frames: messages for the engine's socket, each of several frames.
        copies: sent at once.
        is_whole: whether the HTTP is right, so that an answer must come.
    """

    name: str
    data: bytes = b""
    frames: tuple[tuple[bytes, ...], ...] = ()
    copies: int = 1
    is_whole: bool = True


def size(rng: Random, largest: int) -> int:
    """From 1 to `largest`, small ones as often as large ones."""
    return int(largest ** rng.random())


def long_text(rng: Random, largest: int = MAX_BODY_BYTES) -> str:
    word = rng.choice(_WORDS)
    return word * (1 + size(rng, largest) // len(word.encode()))


def post(path: str, body: bytes, *, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return (
        f"{head}connection: close\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body
    )


def post_json(path: str, body: Mapping[str, Any]) -> bytes:
    return post(path, json.dumps(body).encode())


def chat(**fields: Any) -> bytes:
    """A small chat with these fields."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, **fields}
    return post_json("/v1/chat/completions", body)


Generator = Callable[[Random], Case]
