"""Parts texts that come in pieces into text and tool calls, whatever the pieces."""

from collections.abc import Callable

from frontend.http.tools.calls import ArgumentsDelta, ArgumentsText, ToolCall, ToolCallFormat
from frontend.http.tools.harmony import HarmonyFormat
from frontend.http.tools.hermes import HermesFormat
from frontend.http.tools.llama3_json import Llama3JsonFormat
from frontend.http.tools.mistral import MistralFormat
from frontend.http.tools.pythonic import PythonicFormat

FORMATS: dict[str, Callable[[], ToolCallFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": Llama3JsonFormat,
    "mistral": MistralFormat,
    "openai": HarmonyFormat,
    "pythonic": PythonicFormat,
}
"""Formats of tool calls by vLLM's names."""

_ALWAYS_PARSED_CHARS = 64
_OFTEN_PARSED_CHARS = 2048
_GROWTH = 16
"""A longer text is parsed again when it has grown by a 16th: all of it is scanned each time."""


def format_of_template(chat_template: str) -> str | None:
    """By the markers that the template shows to the model; None: no format that is known here."""
    if "<|channel|>commentary" in chat_template:
        return "openai"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<tool_call>" in chat_template:
        # calls in XML between the same markers: Qwen3-Coder, GLM
        is_xml = "<function=" in chat_template or "<arg_key>" in chat_template
        return None if is_xml else "hermes"
    if "func_name1(" in chat_template:
        return "pythonic"
    if "<|start_header_id|>" in chat_template and '"parameters"' in chat_template:
        return "llama3_json"
    return None


class ToolCallStream:
    """One answer. A call is passed on when it is complete: what turns out to be none is text.
    White space between calls, and before the first one if nothing else is there, is left out.

    Args:
        streams_arguments: JSON arguments are passed on as they come, without knowing their end. The
            rest of a malformed call is text, and one that is cut is without its end.
    """

    def __init__(self, call_format: ToolCallFormat, *, streams_arguments: bool = False) -> None:
        self._format = call_format
        self._streams_arguments = streams_arguments
        self._arguments: ArgumentsText | None = None
        """The arguments of the call that is held, if it was passed on."""
        self._head_length = 0
        self._held = ""
        self._parsed_at = 0
        """Length of what was held when it was parsed last."""
        self._blank = ""
        """Text that may be white space between calls."""
        self._before = ""
        self._has_calls = False

    def feed(self, text: str) -> list[str | ToolCall | ArgumentsDelta]:
        """The text and calls that are certain by now."""
        self._held += text
        is_long = len(self._held) > _ALWAYS_PARSED_CHARS + len(text)
        is_open = self._arguments is not None and not self._arguments.is_over
        if is_long and not is_open and not any(closing in text for closing in ">]}"):
            return []  # every call ends with one of them: do not scan long arguments again
        num_held, grown = len(self._held), len(self._held) - self._parsed_at
        if not is_open and num_held > _OFTEN_PARSED_CHARS and grown * _GROWTH < num_held:
            return []
        parts = self._parse(at_end=False)
        self._parsed_at = len(self._held)
        return parts

    def close(self) -> list[str | ToolCall | ArgumentsDelta]:
        """The rest of it."""
        parts = self._parse(at_end=True)
        if self._blank and not self._has_calls:
            parts.append(self._blank)
        return parts

    def _parse(self, *, at_end: bool) -> list[str | ToolCall | ArgumentsDelta]:
        parts: list[str | ToolCall | ArgumentsDelta] = []
        while self._held:
            if self._arguments is None:
                self._pass_text(self._format.find(self._held, self._before), parts)
                if not self._held:
                    break
                if self._streams_arguments:
                    self._begin_call(parts)
            arguments = self._arguments
            if arguments is not None and not arguments.is_over:
                self._pass_arguments(arguments, parts)
                if not arguments.is_over and not at_end:
                    break
            if arguments is None or arguments.is_whole:
                parsed = self._format.parse(self._held, at_end=at_end)
                if parsed is None:
                    break
                if parsed.calls:
                    parts += self._calls(parsed.calls) if arguments is None else parsed.calls[1:]
                    self._end_call(parsed.length)
                    continue
                if arguments is None:
                    self._pass_text(parsed.length, parts)
                    continue
            self._end_call(self._head_length + arguments.num_chars)
        return parts

    def _calls(self, calls: tuple[ToolCall, ...]) -> list[ToolCall]:
        """With the text that the model wrote, as where it is passed on in pieces."""
        head, text = self._format.head.match(self._held), ArgumentsText()
        written = "" if head is None else text.feed(self._held[head.end() :])
        if head is None or not text.is_whole:
            return list(calls)
        return [ToolCall(head[head.lastindex or 0], written), *calls[1:]]

    def _begin_call(self, parts: list[str | ToolCall | ArgumentsDelta]) -> None:
        head = self._format.head.match(self._held)
        if head is not None:
            self._arguments, self._head_length = ArgumentsText(), head.end()
            parts.append(ToolCall(head[head.lastindex or 0], ""))

    def _pass_arguments(
        self, arguments: ArgumentsText, parts: list[str | ToolCall | ArgumentsDelta]
    ) -> None:
        text = arguments.feed(self._held[self._head_length + arguments.num_chars :])
        if text:
            parts.append(ArgumentsDelta(text))

    def _end_call(self, length: int) -> None:
        self._held, self._arguments = self._held[length:], None
        self._has_calls, self._blank, self._before = True, "", ""

    def _pass_text(self, length: int, parts: list[str | ToolCall | ArgumentsDelta]) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if not self._before:
            text = self._blank + text
            is_blank = not text.strip(self._format.separators)
            self._blank = text if is_blank else ""
            if is_blank:
                return
        if text:
            parts.append(text)
            self._before = text[-1]
