"""A model's reasoning, parted from its answer: `<think>...</think>` at the start of the text."""

from dataclasses import dataclass

from frontend.http.tools.calls import find_marker


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """
    Args:
        always_opens: the text begins inside of the block, whether `start` is there or not.
        shows_special_tokens: the markers are special tokens.
    """

    start: str = "<think>"
    end: str = "</think>"
    always_opens: bool = False
    shows_special_tokens: bool = False

    def opens_in(self, prompt: str) -> bool:
        """Whether a template has opened the block at the end of the prompt."""
        return self.always_opens or prompt.rstrip().endswith(self.start)


REASONING_FORMATS: dict[str, ReasoningFormat | None] = {
    "deepseek_r1": ReasoningFormat(always_opens=True),
    "qwen3": ReasoningFormat(),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", shows_special_tokens=True),
    "none": None,
}
"""By vLLM's names. "none": texts are left as they are."""


def reasoning_format_of_template(chat_template: str) -> ReasoningFormat | None:
    """By the marker that the template shows or removes."""
    if "[/THINK]" in chat_template:
        return REASONING_FORMATS["mistral"]
    return REASONING_FORMATS["qwen3"] if "</think>" in chat_template else None


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
