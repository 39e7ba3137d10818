"""gpt-oss, as `HarmonyStream` passes its calls on:
`<|channel|>commentary to=functions.name<|message|>{...}<|call|>`."""

import re

from frontend.http.tools.calls import Parsed, bracket_end, find_marker, load_json, make_call

MESSAGE = "<|message|>"
CALL_START = "<|channel|>commentary to=functions."
CALL_END = "<|call|>"


class HarmonyFormat:
    shows_special_tokens = True
    separators = " \t\r\n"
    head = re.compile(rf"{re.escape(CALL_START)}([\w.-]{{1,64}}){re.escape(MESSAGE)}\s*(?=\{{)")

    def find(self, text: str, before: str) -> int:
        return find_marker(text, CALL_START)

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        malformed = Parsed(min(len(text), len(CALL_START)))
        head = self.head.match(text)
        if head is None:
            waits = not text[len(CALL_START) :].partition(MESSAGE)[2].strip()
            return None if waits and not at_end else malformed
        length = bracket_end(text[head.end() :])
        if length is None:
            return malformed if at_end else None
        stop = head.end() + length
        call = make_call(head[1], load_json(text[head.end() : stop]))
        if call is None:
            return malformed
        rest = text[stop:].lstrip()
        if not at_end and rest != CALL_END and CALL_END.startswith(rest):
            return None  # its end comes yet
        if rest.startswith(CALL_END):
            stop = len(text) - len(rest) + len(CALL_END)
        return Parsed(stop, (call,))
