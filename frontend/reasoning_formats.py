"""How models mark their reasoning: `<think>...</think>` at the start of the text, or as messages
of a channel."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """
    Args:
        always_opens: the text begins inside of the block, whether `start` is there or not.
        shows_special_tokens: the markers are special tokens.
        answer: what stands around the answer behind it, and is no part of it.
        shown: what a chat template has that writes so; empty: `end`.
        is_harmony: a text is several messages, see `frontend.http.harmony`; `end` leads to
            the one that is the answer.
    """

    start: str = "<think>"
    end: str = "</think>"
    always_opens: bool = False
    shows_special_tokens: bool = False
    answer: tuple[str, str] | None = None
    shown: tuple[str, ...] = ()
    is_harmony: bool = False

    def opens_in(self, prompt: str) -> bool:
        """Whether a template has opened the block at the end of the prompt."""
        return self.always_opens or prompt.rstrip().endswith(self.start)


_THINK = ReasoningFormat()
REASONING_FORMATS: dict[str, ReasoningFormat | None] = {
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        shows_special_tokens=True,
        shown=("<|channel|>analysis",),
        is_harmony=True,
    ),
    "muse_glimmer": ReasoningFormat(
        " to=self<|message|>",
        "<|eom|><|start|>assistant to=user<|message|>",
        shows_special_tokens=True,
        shown=("to=self<|message|>", "<|eom|>"),
        is_harmony=True,
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", shows_special_tokens=True),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", shows_special_tokens=True),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        shows_special_tokens=True,
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        shown=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "cohere_command": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        shows_special_tokens=True,
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", shows_special_tokens=True),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "hy_v3": ReasoningFormat("<think:opensource>", "</think:opensource>", shown=("</think{}>",)),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "kimi_vl": ReasoningFormat("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    "exaone_deep": ReasoningFormat("<thought>", "</thought>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "apriel": ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "hunyuan_a13b": ReasoningFormat(
        answer=("<answer>", "</answer>"), shown=("</think>", "<answer>")
    ),
    "ernie45": ReasoningFormat(
        answer=("<response>", "</response>"), shown=("</think>", "<response>")
    ),
    "qwen3": _THINK,
    **dict.fromkeys(
        ("glm45", "deepseek_v3", "minimax_m2", "kimi_k2", "nemotron_v3", "olmo3", "step3", "holo2"),
        _THINK,
    ),
    "deepseek_r1": ReasoningFormat(always_opens=True, shown=("never",)),
    "none": None,
}
"""Formats of reasoning by vLLM's names. "none": texts are left as they are."""


def reasoning_name_of_template(chat_template: str) -> str | None:
    """The first format whose markers the template shows or removes; None: none of them."""
    for name, each in REASONING_FORMATS.items():
        if each is not None and all(part in chat_template for part in each.shown or (each.end,)):
            return name
    return None


def reasoning_format_of_template(chat_template: str) -> ReasoningFormat | None:
    """The format of `reasoning_name_of_template`."""
    name = reasoning_name_of_template(chat_template)
    return None if name is None else REASONING_FORMATS[name]
