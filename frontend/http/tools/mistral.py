"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since version 11 of its
tokenizer `[TOOL_CALLS]name[ARGS]{...}` for each call, with or without `[CALL_ID]` and `[ARGS]`."""

import re

from frontend.http.tools.calls import (
    CALL_HEAD,
    Parsed,
    ToolCall,
    bracket_end,
    call_of_json,
    find_marker,
    load_json,
    make_call,
)

_START = "[TOOL_CALLS]"
_HEAD = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?[ \t]{0,8}(?=\{)")
_MAX_HEAD_CHARS = 256
"""More than `_HEAD` matches."""


class MistralFormat:
    shows_special_tokens = True
    separators = " \t\r\n"
    head = re.compile(rf"{re.escape(_START)}\s*(?:\[?\s*{CALL_HEAD}|{_HEAD.pattern})")

    def find(self, text: str, before: str) -> int:
        return find_marker(text, _START)

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        body = text[len(_START) :].lstrip()
        if not body or not text.startswith(_START):
            return Parsed(len(text)) if at_end else None
        malformed = Parsed(len(_START))
        head = None
        if body[0] not in "[{":
            head = _HEAD.match(body)
            if head is None:
                waits = "{" not in body and "\n" not in body and len(body) < _MAX_HEAD_CHARS
                return None if waits and not at_end else malformed
        start = 0 if head is None else head.end()
        length = bracket_end(body[start:])
        if length is None:
            return malformed if at_end else None
        value = load_json(body[start : start + length])
        calls: list[ToolCall | None]
        if head is not None:
            calls = [make_call(head[1], value)]
        else:
            calls = [call_of_json(each) for each in (value if isinstance(value, list) else [value])]
        found = tuple(call for call in calls if call is not None)
        if len(found) < len(calls):
            return malformed
        return Parsed(len(text) - len(body) + start + length, found)
