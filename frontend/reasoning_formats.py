"""How models mark their reasoning: `<think>...</think>` at the start of the text, or as messages
of a channel."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """
    Args:
        always_opens: the text begins inside of the block, whether `start` is there or not.
        shows_special_tokens: the markers are special tokens.
        is_harmony: a text is several messages, see `frontend.http.harmony`; `end` begins the one
            that is the answer.
    """

    start: str = "<think>"
    end: str = "</think>"
    always_opens: bool = False
    shows_special_tokens: bool = False
    is_harmony: bool = False

    def opens_in(self, prompt: str) -> bool:
        """Whether a template has opened the block at the end of the prompt."""
        return self.always_opens or prompt.rstrip().endswith(self.start)


REASONING_FORMATS: dict[str, ReasoningFormat | None] = {
    "deepseek_r1": ReasoningFormat(always_opens=True),
    "qwen3": ReasoningFormat(),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", shows_special_tokens=True),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        always_opens=True,
        shows_special_tokens=True,
        is_harmony=True,
    ),
    "none": None,
}
"""Formats of reasoning by vLLM's names. "none": texts are left as they are."""


def reasoning_format_of_template(chat_template: str) -> ReasoningFormat | None:
    """The format whose marker the template shows or removes."""
    if "<|channel|>analysis" in chat_template:
        return REASONING_FORMATS["openai_gptoss"]
    if "[/THINK]" in chat_template:
        return REASONING_FORMATS["mistral"]
    return REASONING_FORMATS["qwen3"] if "</think>" in chat_template else None
