"""Bodies for every route, by the server's own OpenAPI document: right ones, of which a part is too
large, too deep, too many, of another type or not JSON; and requests that break HTTP."""

import copy
import gzip
import json
from collections.abc import Mapping
from random import Random
from typing import Any

from tests.fuzz.mutation import EXTREMES
from tests.fuzz.server.cases import MAX_BODY_BYTES, Case, long_text, post, size

_VALUES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "prompt": "x",
    "input": "x",
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "content": "x",
    "role": "user",
    "query": "x",
    "documents": ["x"],
    "texts": ["x"],
    "text_1": "x",
    "text_2": "x",
    "tokens": [1],
    "options": {"num_predict": 2},
}
_OFTEN = ("logprobs", "top_logprobs", "prompt_logprobs", "n", "echo", "stop", "logit_bias", "tools")
_COUNTS = (20, 49_152, 2**31 - 1)
_LONG_LISTS: tuple[Any, ...] = (
    0,
    None,
    "",
    {},
    [],
    {"role": "user", "content": ""},
    {"type": "text", "text": "x"},
    {"a": None, "b": [], "c": {}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    {"type": "function", "function": {"name": "f", "parameters": {}}},
)
_UNTOUCHED = ("/api/pull", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""They are for operators, and change what is served."""


class Bodies:
    """`document`: the server's /openapi.json."""

    def __init__(self, document: Mapping[str, Any], model: str) -> None:
        self._schemas = document["components"]["schemas"]
        self._model = model
        self._routes = [
            (path, described["post"]["requestBody"]["content"]["application/json"]["schema"])
            for path, described in document["paths"].items()
            if "requestBody" in described.get("post", {}) and path not in _UNTOUCHED
        ]

    def __call__(self, rng: Random) -> Case:
        path, schema = rng.choice(self._routes)
        body = self._sample(schema, rng, 0)
        if not isinstance(body, dict):
            body = {}
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            body = _changed(body, rng)
        data = _written(body, rng)
        return Case(f"body of {path}", data=_sent(path, data, rng)[0], is_whole=True)

    def broken(self, rng: Random) -> Case:
        """HTTP that is wrong, or compressed, or has trailers."""
        path, schema = rng.choice(self._routes)
        data, is_whole = _sent(
            path, json.dumps(self._sample(schema, rng, 0)).encode(), rng, wrong=True
        )
        return Case(f"HTTP to {path}", data=data, is_whole=is_whole)

    def _sample(self, schema: Mapping[str, Any], rng: Random, depth: int) -> Any:
        if "$ref" in schema:
            return self._sample(self._schemas[schema["$ref"].rpartition("/")[2]], rng, depth)
        if kinds := schema.get("anyOf"):
            return self._sample(rng.choice(kinds), rng, depth)
        if choices := schema.get("enum"):
            return rng.choice(choices)
        match schema.get("type"):
            case "object":
                fields = schema.get("properties", {})
                needed = schema.get("required", ())
                return {
                    name: self._field(name, field, rng, depth)
                    for name, field in fields.items()
                    if name in needed or (name in _VALUES and depth == 0) or rng.random() < 0.1
                }
            case "array":
                return [self._sample(schema.get("items", {}), rng, depth + 1)] if depth < 6 else []
            case "integer":
                return rng.randrange(3)
            case "number":
                return rng.random()
            case "boolean":
                return rng.random() < 0.5
            case "string":
                return "x"
        return None

    def _field(self, name: str, schema: Mapping[str, Any], rng: Random, depth: int) -> Any:
        if name == "model":
            return self._model
        if name in _VALUES and (depth == 0 or name in ("role", "content")):
            return copy.deepcopy(_VALUES[name])
        return self._sample(schema, rng, depth + 1)


def _changed(body: Any, rng: Random) -> Any:
    if not isinstance(body, dict):
        return body
    if rng.random() < 0.3:
        name = rng.choice(_OFTEN)
        return {**body, name: rng.choice((*_COUNTS, *EXTREMES, _large(rng)))}
    if rng.random() < 0.15:
        return {**body, **{f"field{number}": None for number in range(size(rng, 300_000))}}
    return _with_leaf(body, rng)


def _with_leaf(value: Any, rng: Random) -> Any:
    """One part replaced, also in the middle."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice([*value])
        return {**value, key: _with_leaf(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.6:
        return [*value[:-1], _with_leaf(value[-1], rng)]
    return rng.choice((rng.choice(EXTREMES), _large(rng), _large(rng)))


def _large(rng: Random) -> Any:
    match rng.randrange(5):
        case 0:
            value: Any = []
            for _ in range(size(rng, 900)):
                value = [value] if rng.random() < 0.5 else {"a": value}
            return value
        case 1 | 2:
            part = rng.choice(_LONG_LISTS)
            return [part] * size(rng, (MAX_BODY_BYTES - 4096) // (len(json.dumps(part)) + 2))
        case 3:
            return {f"{number}": 1 for number in range(size(rng, 1_000_000))}
    return long_text(rng, MAX_BODY_BYTES * 5 // 6)


def _written(body: Any, rng: Random) -> bytes:
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
    if rng.random() < 0.1:
        at = rng.randrange(len(data) + 1)
        wrong = (
            b"\\ud83d",
            b"\xff",
            b"\xf0\x9f",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"\0",
            b'"',
            b"",
        )
        data = data[:at] + rng.choice(wrong) + data[at + rng.randrange(2) :]
    if rng.random() < 0.05:
        data = data[: rng.randrange(len(data) + 1)]
    return data


def _sent(path: str, data: bytes, rng: Random, *, wrong: bool = False) -> tuple[bytes, bool]:
    if not wrong:
        return post(path, data), True
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n".encode()
    chunk = b"%x\r\n%s\r\n" % (len(data), data)
    match rng.randrange(7):
        case 0:  # trailers
            trailers = b"".join(b"x-%d: y\r\n" % number for number in range(size(rng, 500_000)))
            return (
                head
                + b"transfer-encoding: chunked\r\n\r\n"
                + chunk
                + b"0\r\n"
                + trailers
                + b"\r\n",
                False,
            )
        case 1:  # chunks of a byte
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data * (1 + size(rng, 20_000)))
            return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n", True
        case 2:
            packed = gzip.compress(data + b" " * size(rng, 100 << 20), 1)
            return post(path, packed, headers="content-encoding: gzip\r\n"), True
        case 3:
            both = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
            return head + both + chunk + b"0\r\n\r\n", False
        case 4:
            return head + b"content-length: %d\r\n\r\n" % rng.choice((0, 2**63, 2**64, 3)) + data[
                :3
            ], False
        case 5:
            headers = "".join(f"x-{number}: y\r\n" for number in range(size(rng, 100_000)))
            return post(path, data, headers=headers), False
    junk = bytearray(post(path, data))
    for _ in range(size(rng, 20)):
        junk[rng.randrange(min(len(junk), 200))] = rng.randrange(256)
    return bytes(junk), False
