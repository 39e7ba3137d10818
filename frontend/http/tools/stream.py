"""Parts texts that come in pieces into text and tool calls, whatever the pieces."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from frontend.http.tools.calls import (
    ArgumentsDelta,
    ArgumentsReader,
    ToolCall,
    ToolCallFormat,
    is_scanned_enough,
)
from frontend.http.tools.llama3_json import Llama3JsonFormat
from frontend.http.tools.marked import MarkedFormat
from frontend.http.tools.nested import NestedFormat
from frontend.http.tools.pythonic import PythonicFormat
from frontend.http.tools.syntax import call_syntaxes

Schemas = Mapping[str, Mapping[str, Any] | None]
"""JSON schemas of the arguments, by the names of tools."""

FORMATS: dict[str, Callable[[Schemas], ToolCallFormat]] = {
    "llama3_json": lambda _: Llama3JsonFormat(),
    "pythonic": lambda _: PythonicFormat(),
    "minimax_m3": NestedFormat,
}
"""Formats of tool calls by vLLM's names; other names of one have the same value."""
FORMATS["llama4_json"] = FORMATS["llama3_json"]
for _first, _syntax in call_syntaxes().items():
    FORMATS |= dict.fromkeys((_first, *_syntax.names), partial(MarkedFormat, _syntax))

_ALWAYS_PARSED_CHARS = 64


def list_of_formats() -> str:
    """A line for each: its names, and who writes so."""
    families = {
        "llama3_json, llama4_json": "Llama 3: an object of name and parameters",
        "pythonic": "Llama 3.2: [name(key=value)]",
        "minimax_m3": "MiniMax M3: tags within tags",
    }
    families |= {
        ", ".join((first, *syntax.names)): syntax.family
        for first, syntax in call_syntaxes().items()
    }
    return "\n".join(f"{names:<46} {family}" for names, family in families.items())


def format_of_template(chat_template: str) -> str | None:
    """By the markers that the template shows to the model; None: no format that is known here."""
    for name, syntax in call_syntaxes().items():
        if syntax.is_shown_in(chat_template):
            return name
    if "]<]minimax[>[" in chat_template:
        return "minimax_m3"
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
        self._arguments: ArgumentsReader | None = None
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
        if not is_open and is_scanned_enough(len(self._held), self._parsed_at):
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
        head = self._format.head.match(self._held)
        if head is None:
            return list(calls)
        name = head[head.lastindex or 0]
        written = (text := self._format.arguments(name)).feed(self._held[head.end() :])
        return [ToolCall(name, written), *calls[1:]] if text.is_whole else list(calls)

    def _begin_call(self, parts: list[str | ToolCall | ArgumentsDelta]) -> None:
        head = self._format.head.match(self._held)
        if head is not None:
            name, self._head_length = head[head.lastindex or 0], head.end()
            self._arguments = self._format.arguments(name)
            parts.append(ToolCall(name, ""))

    def _pass_arguments(
        self, arguments: ArgumentsReader, parts: list[str | ToolCall | ArgumentsDelta]
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
