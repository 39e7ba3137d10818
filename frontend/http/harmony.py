"""Harmony, the messages that gpt-oss writes (github.com/openai/harmony), and Muse Glimmer's, which
have no channels, parted into reasoning and content.

    <|channel|>analysis<|message|>...<|end|>                             reasoning
    <|start|>assistant<|channel|>final<|message|>...<|return|>           content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
                                                                         a call
    <|start|>assistant<|channel|>analysis to=python<|message|>...<|call|>    reasoning: a tool that
                                                                         nobody offered

    <|start|>assistant to=self<|message|>...<|eom|>                      reasoning (Muse Glimmer)

A prompt has begun the first message: `<|start|>assistant`."""

import re
from collections.abc import Container

from frontend.http.tools.calls import ArgumentsText

_CALL_START, _MESSAGE, _CALL_END = "<|channel|>commentary to=functions.", "<|message|>", "<|call|>"
"""Words of a call, as `tools/formats.toml` has them."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.-]{1,128})")
_PEOPLE = ("user", "assistant", "all")
_ANY_START = ("<|start|>", "<|channel|>", "to=")
_MARKERS = tuple(
    f"<|{name}|>" for name in ("end", "call", "return", "start", "channel", "eom", "eot")
)
_ENDS = re.compile("|".join(map(re.escape, _MARKERS)))
_LONGEST_MARKER = len("<|channel|>")
_MAX_HEADER_CHARS = 512


class HarmonyStream:
    """One answer, as `ReasoningStream`.

    Args:
        tools: names of those that were offered: models leave `functions.` out.
    """

    def __init__(self, tools: Container[str] = ()) -> None:
        self._tools = tools
        self._held = ""
        self._in_header = True
        self._is_start = True
        self._end = ""
        """The text that a message gets behind its own."""
        self._arguments: ArgumentsText | None = None
        """The arguments of a call that is being passed on: a marker in their strings is text."""
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
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None or recipient[2] in _PEOPLE else recipient[2]
        self._end, self._arguments = "", None
        channels = _CHANNEL.findall(header)
        if recipient is not None and (recipient[1] or (channels and name in self._tools)):
            found[1] += f"{_CALL_START}{name}{_MESSAGE}"
            self._end, self.is_reasoning, self._arguments = _CALL_END, False, ArgumentsText()
        else:
            is_inner = channels[-1:] == ["analysis"] or (bool(channels) and bool(name))
            self.is_reasoning = is_inner or name == "self"
        self._held, self._in_header, self._is_start = rest, False, False
        return True

    def _pass_on(self, found: list[str]) -> bool:
        """Takes what is certain of a message's text; False: it goes on."""
        if self._arguments is not None and not self._arguments.is_over:
            begun = self._arguments.num_chars
            self._arguments.feed(self._held)
            length = self._arguments.num_chars - begun
            found[1] += self._held[:length]
            self._held = self._held[length:]
            if not self._arguments.is_over:
                return False
        end = _ENDS.search(self._held)
        stop = self._certain() if end is None else end.start()
        found[not self.is_reasoning] += self._held[:stop]
        self._held = self._held[stop:]
        if end is None:
            return False
        found[not self.is_reasoning] += self._end
        if end[0] != "<|channel|>":  # that begins a message, after one without an end
            self._held = self._held[len(end[0]) :]
        self._in_header, self.is_reasoning = True, False
        return True

    def _certain(self) -> int:
        """How much of what is held is no beginning of a marker."""
        start = self._held.rfind("<", -_LONGEST_MARKER)
        is_open = start >= 0 and any(each.startswith(self._held[start:]) for each in _MARKERS)
        return start if is_open else len(self._held)
