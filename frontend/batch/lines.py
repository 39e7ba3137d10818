"""A line of a batch: a request in, an answer out, in the forms of OpenAI's batch files."""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from frontend.errors import InvalidInput

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    *(f"{version}/{name}" for name in ("score", "rerank") for version in ("", "/v1")),
    "/v2/rerank",
)
"""The URLs that a line may name."""
_URL_OF_FIELD = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
}
"""The URL of a line that is a body alone, by one of its fields."""


class Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, frozen=True):
    """`response` and `error`: of a request that the engine refused or could not finish both."""

    id: str
    custom_id: str
    response: Response | None
    error: Error | None

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


@dataclass(frozen=True, slots=True)
class Question:
    """A line of the input. `refusal`: why it cannot be asked."""

    custom_id: str
    url: str = ""
    body: dict[str, Any] | None = None
    refusal: str | None = None


def refused(custom_id: str, message: str) -> BatchAnswer:
    """An answer to what cannot be asked."""
    return BatchAnswer(new_id(), custom_id, None, Error("invalid_request", message))


def new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def read_question(number: int, line: bytes) -> Question:
    """A line of OpenAI's (`custom_id`, `method`, `url`, `body`), a body with `messages`, `prompt`
    or `input`, or a prompt as a JSON string. Without a `custom_id` it has that of its line."""
    custom_id = f"line-{number}"
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Question(custom_id, refusal=f"line {number} is not valid JSON: {error}")
    if isinstance(found, str):
        found = {"prompt": found}
    if not isinstance(found, dict):
        return Question(custom_id, refusal=f"line {number} is not an object; give one a line")
    given = found.pop("custom_id", custom_id)
    if not isinstance(given, str):
        why = f"custom_id of line {number} is {given!r:.40}, it must be a string"
        return Question(custom_id, refusal=why)
    custom_id = given
    if not found.keys() & {"url", "body", "method"}:
        url = next((url for field, url in _URL_OF_FIELD.items() if field in found), None)
        if url is None:
            why = f"line {number} has no url and body, and none of {', '.join(_URL_OF_FIELD)}"
            return Question(custom_id, refusal=f"{why}; give one of them")
        found = {"url": url, "body": found}
    url, body, method = found.get("url"), found.get("body"), found.get("method", "POST")
    if url not in URLS or method != "POST":
        why = f"{method!r:.20} {url!r:.80} is not supported in a batch; use POST and one of "
        return Question(custom_id, refusal=why + ", ".join(URLS))
    if not isinstance(body, dict):
        return Question(custom_id, refusal=f"body of line {number} is not an object; give one")
    for name in ("stream", "background"):
        if body.get(name):
            return Question(custom_id, refusal=f"{name} is not supported in a batch; omit it")
    return Question(custom_id, url, body)


@dataclass(frozen=True)
class BatchInput:
    """A file's lines that are not empty. All of them are in memory.

    Args:
        custom_ids: and the lines, in order.
    """

    name: str
    sha256: str
    lines: dict[str, tuple[int, bytes]]

    @classmethod
    def read(cls, path: Path) -> "BatchInput":
        """Raises InvalidInput: a custom_id is given twice; OSError."""
        data = path.read_bytes()
        lines: dict[str, tuple[int, bytes]] = {}
        for number, line in enumerate(data.split(b"\n"), start=1):
            if not line.strip():
                continue
            custom_id = read_question(number, line).custom_id
            if custom_id in lines:
                raise InvalidInput(
                    f"{path}: lines {lines[custom_id][0]} and {number} have the same custom_id "
                    f"{custom_id!r:.80}; give each its own"
                )
            lines[custom_id] = number, line
        return cls(path.name, hashlib.sha256(data).hexdigest(), lines)
