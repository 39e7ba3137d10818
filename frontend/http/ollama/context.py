"""Prompts that are longer than the context, shortened as Ollama does it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from frontend.async_llm import AsyncLLM
from frontend.errors import PromptTooLong
from frontend.http.ollama import bodies
from frontend.inputs.prompts import TokensPrompt

Messages = Sequence[Mapping[str, Any]]
_KEPT_AT_START = 4
"""Ollama's default of `num_keep`."""


class Context:
    """Prompt and answer have `num_tokens` together. What must be shortened leaves an answer up to a
    quarter of them: Ollama goes on where it is full, this engine ends.

    Args:
        truncates: False: nothing is shortened, so that a longer prompt is refused.
    """

    def __init__(self, llm: AsyncLLM, options: bodies.Options, *, truncates: bool) -> None:
        self.num_tokens = min(int(options.num_ctx or 2**62), llm.model.max_model_len)
        wanted, most = int(options.num_predict or 0), max(1, self.num_tokens // 4)
        self._num_left = self.num_tokens - (min(wanted, most) if wanted > 0 else most)
        self._num_kept = _KEPT_AT_START if options.num_keep is None else int(options.num_keep)
        self._truncates = truncates

    async def chat_prompt(
        self, render: Callable[[Messages], Awaitable[TokensPrompt]], messages: Messages
    ) -> TokensPrompt:
        """Without the oldest messages, if they are too many: those of the system stay, and all from
        one of the user's on, at least the last. Raises PromptTooLong, and what `render` raises."""
        try:
            prompt = await render(messages)
            if not self._truncates or len(prompt["prompt_token_ids"]) < self.num_tokens:
                return prompt
        except PromptTooLong:
            if not self._truncates:
                raise
        last = len(messages) - 1
        starts = [at for at in range(1, last) if messages[at]["role"] == "user"] + [last]

        async def behind(start: int) -> TokensPrompt:
            kept = [each for each in messages[:start] if each["role"] == "system"]
            return await render([*kept, *messages[start:]])

        low, high = 0, len(starts) - 1
        while low < high:  # the later, the shorter
            middle = (low + high) // 2
            try:
                fits = len((await behind(starts[middle]))["prompt_token_ids"]) <= self._num_left
            except PromptTooLong:
                fits = False
            low, high = (low, middle) if fits else (middle + 1, high)
        return self.cut(await behind(starts[low]))

    def cut(self, prompt: TokensPrompt) -> TokensPrompt:
        """Without tokens behind the first ones, if they are too many; media cannot be cut."""
        token_ids = prompt["prompt_token_ids"]
        if not self._truncates or "multimodal" in prompt or len(token_ids) < self.num_tokens:
            return prompt
        num_kept = min(max(0, self._num_kept), self._num_left // 2)
        end = token_ids[num_kept + len(token_ids) - self._num_left :]
        return {**prompt, "prompt_token_ids": token_ids[:num_kept] + end}
