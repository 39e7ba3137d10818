"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`; several are parted by `;`."""

import re

from frontend.http.tools.calls import (
    CALL_HEAD,
    ArgumentsText,
    Parsed,
    bracket_end,
    call_of_json,
    find_at_line_start,
    find_marker,
    load_json,
)

_TAG = "<|python_tag|>"
_KEYS = ("name", "parameters", "arguments", "type")
_FIRST_KEY = re.compile(r'\{\s*(?:"([^"]*)("?))?')


class Llama3JsonFormat:
    shows_special_tokens = False
    is_marked = False
    separators = " \t\r\n;"
    head = re.compile(rf"(?:{re.escape(_TAG)})?{CALL_HEAD}")

    def find(self, text: str, before: str) -> int:
        """A brace at the start of an answer or of a line, or the tag."""
        tag = find_marker(text, _TAG)
        return min(tag, find_at_line_start(text, "{", before, self.separators))

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        offset = len(_TAG) if text.startswith(_TAG) else 0
        body = text[offset:]
        if not body or _TAG.startswith(text):
            return Parsed(len(text)) if at_end else None
        if not body.startswith("{"):
            return Parsed(max(offset, 1))
        if not _may_be_call(body):
            return Parsed(offset + 1)
        end = bracket_end(body)
        if end is None and not at_end:
            return None
        call = call_of_json(load_json(body[:end] if end else body + "}"))
        if end is None:
            return Parsed(offset + 1) if call is None else Parsed(len(text), (call,))
        return Parsed(offset + end, () if call is None else (call,))

    def arguments(self, name: str) -> ArgumentsText:
        return ArgumentsText()


def _may_be_call(body: str) -> bool:
    """Whether its first key is a call's: other JSON is not held back to its end."""
    match = _FIRST_KEY.match(body)
    assert match is not None
    key, closed = match.groups()
    if key is None:
        return not body[match.end() :]
    return key in _KEYS if closed else any(each.startswith(key) for each in _KEYS)
