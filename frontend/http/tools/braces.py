"""Gemma's notation of arguments: `{city:<|"|>Paris<|"|>,days:3,near:[true,{a:null}]}`."""

import re
from typing import Any

from frontend.http.tools.tagged import NeedsMore, typed

_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"\s*([^:,{}\[\]]{1,128})\s*:\s*")
_MOST_DEPTH = 64
_CLOSING = {"{": "}", "[": "]"}


def read_braces(text: str, at: int, quote: str, depth: int = 0) -> tuple[Any, int] | None:
    """The value at `at`, and where it ends; None: it is none.
    Raises NeedsMore: it has no end yet."""
    while at < len(text) and text[at].isspace():
        at += 1
    if at == len(text) or quote.startswith(text[at:]):
        raise NeedsMore
    for mark in (quote, '"'):
        if text.startswith(mark, at):
            end = text.find(mark, at + len(mark))
            if end < 0:
                raise NeedsMore
            return text[at + len(mark) : end], end + len(mark)
    if text[at] in _CLOSING and depth < _MOST_DEPTH:
        return _read_several(text, at, quote, depth)
    bare = _BARE.match(text, at)
    assert bare is not None
    if bare.end() == len(text):
        raise NeedsMore
    return (typed(bare[0].strip(), set()), bare.end()) if bare[0].strip() else None


def read_key(name: str, quote: str) -> str | None:
    """What a name of a property is read as; None: it cannot be written."""
    key = _KEY.match(f"{name}:")
    return None if key is None else _bare_key(key[1], quote)


def _bare_key(key: str, quote: str) -> str:
    return key.strip().removeprefix(quote).removesuffix(quote).strip("\"' ")


def _read_several(text: str, at: int, quote: str, depth: int) -> tuple[Any, int] | None:
    """The object or array that begins at `at`, and where it ends; None: it is none."""
    closing = _CLOSING[text[at]]
    keys: list[str] = []
    values: list[Any] = []
    at += 1
    while True:
        while at < len(text) and (text[at].isspace() or (values and text[at] == ",")):
            at += 1
        if at == len(text):
            raise NeedsMore
        if text[at] == closing:
            read = dict(zip(keys, values, strict=True)) if closing == "}" else values
            return read, at + 1
        if closing == "}":
            key = _KEY.match(text, at)
            if key is None:
                if re.fullmatch(r"[^:,{}\[\]]{0,128}", text[at:]):
                    raise NeedsMore
                return None
            keys.append(_bare_key(key[1], quote))
            at = key.end()
        found = read_braces(text, at, quote, depth + 1)
        if found is None:
            return None
        values.append(found[0])
        at = found[1]
