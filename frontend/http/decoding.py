"""A request's body to the Struct that its route takes; what it is not is refused by name."""

import asyncio
import difflib
import itertools
import json
import re
from collections.abc import AsyncIterable, Callable
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from frontend.http.api_errors import ApiError

_MOST = {"values": 2**19, "texts": 2**17, "names": 2**16, "objects and arrays": 2**14}
"""So many are decoded and looked at in less than 100 ms, in which nobody else is answered. Names
are texts, too."""
_LARGE_BYTES = 2**16
_UNKNOWN = "Object contains unknown field `"
_NO_CHOICE = ("Invalid enum value ", "Invalid value ")
_HALF_PAIR = re.compile(
    rb"(?<!\\)(?:\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..)"
)
_SAME = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict",
     "n_predict", "max_length"),
    ("stop", "stop_sequences"), ("temperature", "temp"), ("id_slot", "slot_id"),
    ("repetition_penalty", "repeat_penalty"),
    ("n", "num_return_sequences"), ("tools", "functions"), ("tool_choice", "function_call"),
    ("messages", "prompt", "input"), ("instructions", "system"),
    ("response_format", "text", "format", "output_config"),
)  # fmt: skip
"""Names of one thing in several APIs."""
_NEAR = 16
"""Bytes from where the decoder gives up to where a surrogate pair began."""
Cleaner = Callable[[Any], None]


class BodyCounter:
    """Counts what a body in JSON is made of while it comes, and before it is made objects."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(_MOST, 0)
        self._num_quotes = 0
        self._held = b""

    def feed(self, piece: bytes) -> None:
        """Raises ApiError: there are too many."""
        piece, self._held = self._held + piece, b""
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the character behind it is to come
            piece, self._held = piece[:-1], b"\\"
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._num_quotes % 2 :: 2])
        self._num_quotes += len(parts) - 1
        self.counts["values"] += outside.count(b",")
        self.counts["names"] += outside.count(b":")
        self.counts["objects and arrays"] += outside.count(b"{") + outside.count(b"[")
        self.counts["texts"] = self._num_quotes // 2
        for what, most in _MOST.items():
            if self.counts[what] > most:
                raise ApiError(
                    413, f"the body has more than {most} {what}; send fewer, in several requests"
                )


async def read_body(pieces: AsyncIterable[bytes]) -> bytes:
    """All of it. Raises ApiError: it is of too many parts."""
    counter, body = BodyCounter(), []
    async for piece in pieces:
        counter.feed(piece)
        body.append(piece)
    return b"".join(body)


async def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """An unknown field that is null asks for nothing, as many clients send it: it is left out.

    Raises ApiError: the body is not what the route takes.
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN):
                raise
        if len(body) < _LARGE_BYTES:
            return _decode_without_nulls(decoder.type, body)
        return await asyncio.to_thread(_decode_without_nulls, decoder.type, body)
    except RecursionError:
        raise ApiError(400, "the body nests too deeply; send fewer levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not isinstance(error, msgspec.ValidationError):
            raise _no_json(error, body) from None
        raise refusal(error, body=body, kind=decoder.type) from None


def _decode_without_nulls(kind: Any, body: bytes) -> Any:
    document = msgspec.json.decode(body)
    if (clean := _cleaner(kind)) is not None:
        clean(document)
    return msgspec.convert(document, kind)


@cache
def _cleaner(kind: Any) -> Cleaner | None:
    return _cleaner_of(inspect.type_info(kind))


def _cleaner_of(kind: inspect.Type) -> Cleaner | None:
    """Drops nulls that a value of this type has no field for; None: no part of it has fields."""
    types = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    of_items = [
        clean_item
        for each in types
        if isinstance(each, inspect.ListType) and (clean_item := _cleaner_of(each.item_type))
    ]
    structs = [each for each in types if isinstance(each, inspect.StructType)]
    if not (of_items or structs):
        return None
    of_tags = {each.tag: _fields_cleaner(each) for each in structs}
    tag_field = structs[0].tag_field if structs else None

    def clean(value: Any) -> None:
        if isinstance(value, list):
            for of_item in of_items:
                for each in value:
                    of_item(each)
        elif isinstance(value, dict):
            tag = value.get(tag_field) if tag_field else None
            of_fields = of_tags.get(tag) if isinstance(tag, str | None) else None
            if of_fields is not None:
                of_fields(value)

    return clean


def _fields_cleaner(kind: inspect.StructType) -> Cleaner:
    known = {field.encode_name: _cleaner_of(field.type) for field in kind.fields}
    tag_field = kind.tag_field

    def clean(value: dict[str, Any]) -> None:
        for name in [each for each, own in value.items() if own is None]:
            if name not in known and name != tag_field:
                del value[name]
        for name, of_field in known.items():
            if of_field is not None and name in value:
                of_field(value[name])

    return clean


def _no_json(error: Exception, body: bytes) -> ApiError:
    if not body.strip():
        return ApiError(400, "the body is empty; send the request as JSON")
    place = re.search(r"\(byte (\d+)\)", str(error))
    at = max(0, (len(body) if place is None else int(place[1])) - _NEAR)
    half = _HALF_PAIR.search(body[at : at + 2 * _NEAR])
    if half is None:
        return ApiError(400, f"the body is not valid JSON: {error}")
    return ApiError(
        400,
        f"the body has half a surrogate pair, {half[0].decode('latin-1')}, at byte "
        f"{at + half.start()}: a text was cut within a character; cut it between two",
    )


def _what_and_path(error: Exception) -> tuple[str, str]:
    what, _, path = str(error).partition(" - at `$")
    return what, path.rstrip("`").lstrip(".")


def _given(body: bytes, path: str) -> str:
    """The number, text or other single value that stands there in a body that is not large."""
    if not (path and body) or len(body) >= _LARGE_BYTES:
        return ""
    value = msgspec.json.decode(body)
    try:
        for step in re.findall(r"[^.\[\]]+", path):
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (LookupError, TypeError, ValueError):  # a key that the path only hints at: `[...]`
        return ""
    return "" if isinstance(value, dict | list) else f"; it is {json.dumps(value):.100}"


def _meant(name: str, kind: Any) -> str:
    """Which field an unknown one of a body may have been, for its refusal."""
    if name == "extra_body":
        return ": what the openai package has under this name are fields of the body itself"
    fields = getattr(inspect.type_info(kind), "fields", ())
    known = [each.encode_name for each in fields]
    for each in fields:  # Ollama's
        if each.encode_name == "options" and isinstance(each.type, inspect.UnionType):
            inner = (getattr(part, "fields", ()) for part in each.type.types)
            known += [f"options.{part.encode_name}" for part in itertools.chain(*inner)]
    same = [f"options.{name}"] * (f"options.{name}" in known)
    names = [each for group in _SAME if name in group for each in group]
    same += [each for each in known if each.removeprefix("options.") in names]
    near = same or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f", or did you mean {near[0]!r}?" if near else ""


def refusal(error: Exception, within: str = "", *, body: bytes = b"", kind: Any = None) -> ApiError:
    """What a value is not that was to be of a type. `within`: where the value stands. `body`: of
    the request, to say what was given, where the error's path begins there. `kind`: its type."""
    what, param = _what_and_path(error)
    if what.startswith("Expected"):
        what += _given(body, param)
    param = f"{within}.{param}" if within and param else within or param
    if what.startswith(_UNKNOWN):
        name = what.removeprefix(_UNKNOWN).rstrip("`")
        param = f"{param}.{name}" if param else name
        meant = _meant(name, kind) if param == name and kind is not None else ""
        return ApiError(400, f"{param!r:.200} is not supported; omit it{meant}", param=param)
    if missing := re.fullmatch(r"Object missing required field `(.+)`", what):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(400, f"{param} is missing; give it", param=param)
    for prefix in _NO_CHOICE:
        if what.startswith(prefix):
            what = f"{what.removeprefix(prefix)} is not supported; /openapi.json lists what is"
    return ApiError(400, f"{param}: {what}" if param else what, param=param or None)
