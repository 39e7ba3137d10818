"""Harmony, the messages that gpt-oss writes (github.com/openai/harmony), parted into reasoning and
content.

    <|channel|>analysis<|message|>...<|end|>                             reasoning
    <|start|>assistant<|channel|>final<|message|>...<|return|>           content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
                                                                         a call

A prompt has begun the first message: `<|start|>assistant`."""

import re

_CALL_START, _MESSAGE, _CALL_END = "<|channel|>commentary to=functions.", "<|message|>", "<|call|>"
"""Words of a call, as `tools/formats.toml` has them."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]{1,64})")
_ANY_START = ("<|start|>", "<|channel|>", "to=")
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_LONGEST_MARKER = len("<|channel|>")
_MAX_HEADER_CHARS = 512


class HarmonyStream:
    """One answer, as `ReasoningStream`."""

    def __init__(self) -> None:
        self._held = ""
        self._in_header = True
        self._is_start = True
        self._end = ""
        """The text that a message gets behind its own."""
        self.is_reasoning = False

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and content that are certain by now."""
        self._held += text
        found = ["", ""]
        while self._held and (self._begin(found) if self._in_header else self._pass_on(found)):
            pass
        return found[0], found[1]

    def close(self) -> tuple[str, str]:
        """The rest of it."""
        held, self._held = self._held, ""
        if self._in_header and (not self._is_start or held.lstrip().startswith(_ANY_START)):
            return "", ""  # a message that says nothing
        return (held, "") if self.is_reasoning else ("", held)

    def _begin(self, found: list[str]) -> bool:
        """Takes a header; False: more of it must come."""
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            begun = header.lstrip()
            may_be = any(begun.startswith(each[: len(begun)]) for each in _ANY_START)
            if not self._is_start or (may_be and len(header) < _MAX_HEADER_CHARS):
                return False
            self._in_header = self._is_start = False  # no message of its kind: all is content
            return True
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        self.is_reasoning = function is None and channel is not None and channel[1] == "analysis"
        self._end = ""
        if function is not None:
            found[1] += f"{_CALL_START}{function[1]}{_MESSAGE}"
            self._end = _CALL_END
        self._held, self._in_header, self._is_start = rest, False, False
        return True

    def _pass_on(self, found: list[str]) -> bool:
        """Takes what is certain of a message's text; False: it goes on."""
        end = _ENDS.search(self._held)
        stop = self._certain() if end is None else end.start()
        found[not self.is_reasoning] += self._held[:stop]
        self._held = self._held[stop:]
        if end is None:
            return False
        found[not self.is_reasoning] += self._end
        self._held = self._held[len(end[0]) :]
        self._in_header, self.is_reasoning = True, False
        return True

    def _certain(self) -> int:
        """How much of what is held is no beginning of a marker."""
        start = self._held.rfind("<", -_LONGEST_MARKER)
        is_open = start >= 0 and any(
            each.startswith(self._held[start:])
            for each in ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        )
        return start if is_open else len(self._held)
