"""A model's reasoning, parted from its answer: `<think>...</think>` at the start of the text."""

from frontend.http.tools.calls import find_marker
from frontend.reasoning_formats import ReasoningFormat


class ReasoningStream:
    """One answer.

    Args:
        is_open: the block is open already.
    """

    def __init__(self, markers: ReasoningFormat, *, is_open: bool) -> None:
        self._markers = markers
        self._held = ""
        self._is_start = True
        self.is_reasoning = is_open

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and content that are certain by now."""
        self._held += text
        if self._is_start:
            begin = self._held.lstrip()
            if begin.startswith(self._markers.start):
                self._held = begin[len(self._markers.start) :]
                self.is_reasoning = True
            elif self._markers.start.startswith(begin):
                return "", ""
            self._is_start = False
        if not self.is_reasoning:
            content, self._held = self._held, ""
            return "", content
        end = find_marker(self._held, self._markers.end)
        reasoning, self._held = self._held[:end], self._held[end:]
        if not self._held.startswith(self._markers.end):
            return reasoning, ""
        content = self._held[len(self._markers.end) :]
        self._held, self.is_reasoning = "", False
        return reasoning, content

    def close(self) -> tuple[str, str]:
        """The rest of it."""
        held, self._held = self._held, ""
        return (held, "") if self.is_reasoning else ("", held)
