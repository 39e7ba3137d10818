"""Parts texts that come in pieces into text and tool calls, whatever the pieces."""

from collections.abc import Callable

from frontend.http.tools.calls import ToolCall, ToolCallFormat
from frontend.http.tools.hermes import HermesFormat
from frontend.http.tools.llama3_json import Llama3JsonFormat
from frontend.http.tools.mistral import MistralFormat
from frontend.http.tools.pythonic import PythonicFormat

FORMATS: dict[str, Callable[[], ToolCallFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": Llama3JsonFormat,
    "mistral": MistralFormat,
    "pythonic": PythonicFormat,
}
"""By vLLM's names."""

_ALWAYS_PARSED_CHARS = 64


def format_of_template(chat_template: str) -> str | None:
    """By the markers that the template shows to the model; None: no format that is known here."""
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
    White space between calls, and before the first one if nothing else is there, is left out."""

    def __init__(self, call_format: ToolCallFormat) -> None:
        self._format = call_format
        self._held = ""
        self._blank = ""
        """What may be white space between calls."""
        self._before = ""
        self._has_calls = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is certain by now."""
        self._held += text
        is_long = len(self._held) > _ALWAYS_PARSED_CHARS + len(text)
        if is_long and not any(closing in text for closing in ">]}"):
            return []  # every call ends with one of them: do not scan long arguments again
        return self._parse(at_end=False)

    def close(self) -> list[str | ToolCall]:
        """The rest of it."""
        parts = self._parse(at_end=True)
        if self._blank and not self._has_calls:
            parts.append(self._blank)
        return parts

    def _parse(self, *, at_end: bool) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        while self._held:
            self._pass_text(self._format.find(self._held, self._before), parts)
            if not self._held:
                break
            parsed = self._format.parse(self._held, at_end=at_end)
            if parsed is None:
                break
            if not parsed.calls:
                self._pass_text(parsed.length, parts)
                continue
            self._held = self._held[parsed.length :]
            parts += parsed.calls
            self._has_calls, self._blank, self._before = True, "", ""
        return parts

    def _pass_text(self, length: int, parts: list[str | ToolCall]) -> None:
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
