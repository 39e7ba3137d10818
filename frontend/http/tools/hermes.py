"""Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` for each call."""

import re

from frontend.http.tools.calls import CALL_HEAD, Parsed, call_of_json, find_marker, load_json

_START = "<tool_call>"
_END = "</tool_call>"
_BEGUN = re.compile(_START + r"\s*(\S)")
_STRING_OR_END = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|</tool_call>', re.DOTALL)


class HermesFormat:
    shows_special_tokens = True
    separators = " \t\r\n"
    head = re.compile(_START + r"\s*" + CALL_HEAD)

    def find(self, text: str, before: str) -> int:
        return find_marker(text, _START)

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        begun = _BEGUN.match(text)
        if begun is None:
            return Parsed(len(text)) if at_end else None
        if begun[1] != "{":
            return Parsed(len(_START))
        body = text[len(_START) :]
        end = _end_of(body)
        if end is None and not at_end:
            return None
        if end is None:  # a string without its end, or the answer was cut
            end = find_marker(body, _END)
        call = call_of_json(load_json(body[:end]))
        if call is None:  # the fault of small models: the last brace is missing
            call = call_of_json(load_json(body[:end] + "}"))
        if call is None:
            return Parsed(len(_START))
        return Parsed(min(len(text), len(_START) + end + len(_END)), (call,))


def _end_of(body: str) -> int | None:
    """The first end marker that is not part of a string."""
    for match in _STRING_OR_END.finditer(body):
        if match[0] == _END:
            return match.start()
    return None
