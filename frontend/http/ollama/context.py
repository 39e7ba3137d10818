"""Prompts that are longer than the context, shortened as Ollama does it; and answers that go on
where it is full."""

import codecs
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.errors import PromptTooLong
from frontend.http.ollama import bodies
from frontend.inputs.prompts import TokensPrompt
from frontend.outputs import CompletionOutput, RequestOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams
from protocol.outputs import RequestTimings
from protocol.presets import warn_once

Messages = Sequence[Mapping[str, Any]]
TOO_LONG = "the input length exceeds the context length"
"""Ollama's words."""
_KEPT_AT_START = 4
"""Ollama's default of `num_keep`."""
_CONTEXTS = 10
"""An answer without an end of its own is at most so many contexts long, as in Ollama."""
_PART = "\ufffd"
"""The text of a part of a character."""


class Context:
    """Prompt and answer have `num_tokens` together. What must be shortened leaves an answer up to a
    quarter of them.

    Args:
        truncates: False: nothing is shortened, so that a longer prompt is refused.
    """

    def __init__(self, llm: AsyncLLM, options: bodies.Options, *, truncates: bool) -> None:
        self._llm = llm
        most, asked = llm.model.max_model_len, int(options.num_ctx or 0)
        self.num_tokens = min(asked or most, most)
        self.is_shorter = asked > most
        """Whether a longer one was asked for."""
        if self.is_shorter:
            name = llm.model.name
            warn_once(f"{name} has a context of {most} tokens; requests ask for more by num_ctx")
        self.num_dropped_messages = self.num_dropped_tokens = 0
        wanted, quarter = int(options.num_predict or 0), max(1, self.num_tokens // 4)
        self._num_left = self.num_tokens - (min(wanted, quarter) if wanted > 0 else quarter)
        self._num_kept = _KEPT_AT_START if options.num_keep is None else int(options.num_keep)
        if self._num_kept < 0:  # as much as there is room for
            self._num_kept = self.num_tokens
        self._truncates = truncates

    def dropped(self) -> dict[str, int]:
        """Fields of an answer: what the model has not seen, and the context if it is shorter."""
        given = {
            "truncated_messages": self.num_dropped_messages,
            "truncated_tokens": self.num_dropped_tokens,
            "num_ctx": self.num_tokens * self.is_shorter,
        }
        return {name: value for name, value in given.items() if value}

    async def chat_prompt(
        self, render: Callable[[Messages], Awaitable[TokensPrompt]], messages: Messages
    ) -> TokensPrompt:
        """Without the oldest messages, if they are too many: those of the system stay, the last of
        the user's, and all from one of the user's on, or from an answer behind the last of these.
        Raises PromptTooLong, and what `render` raises."""
        try:
            prompt = await render(messages)
            if not self._truncates or len(prompt["prompt_token_ids"]) < self.num_tokens:
                return prompt
        except PromptTooLong:
            if not self._truncates:
                raise
        roles = [each["role"] for each in messages]
        question = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
        starts = [
            at
            for at, role in enumerate(roles)
            if at and (role == "user" or (role == "assistant" and at > question))
        ] or [len(roles) - 1]

        def behind(start: int) -> Messages:
            kept = [at for at in range(start) if roles[at] == "system" or at == question]
            return [*(messages[at] for at in kept), *messages[start:]]

        low, high = 0, len(starts) - 1
        while low < high:  # the later, the shorter
            middle = (low + high) // 2
            try:
                prompt = await render(behind(starts[middle]))
                fits = len(prompt["prompt_token_ids"]) <= self._num_left
            except PromptTooLong:
                fits = False
            low, high = (low, middle) if fits else (middle + 1, high)
        rest = behind(starts[low])
        self.num_dropped_messages = len(messages) - len(rest)
        return self.cut(await render(rest))

    def cut(self, prompt: TokensPrompt) -> TokensPrompt:
        """Without tokens behind the first ones, if they are too many; media cannot be cut."""
        token_ids = prompt["prompt_token_ids"]
        if not self._truncates or "multimodal" in prompt or len(token_ids) < self.num_tokens:
            return prompt
        return {**prompt, "prompt_token_ids": self._without_middle(token_ids, self._num_left)}

    def _without_middle(self, token_ids: list[int], num_left: int) -> list[int]:
        num_kept = min(self._num_kept, num_left // 2)
        num_dropped = len(token_ids) - num_left
        self.num_dropped_tokens += num_dropped
        return token_ids[:num_kept] + token_ids[num_kept + num_dropped :]

    async def shifting(
        self, prompt: TokensPrompt, params: SamplingParams, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`, but where the context is full half of the tokens behind the first
        `num_keep` are left out, what remains is computed again, and the answer goes on. A seed and
        penalties of the answer begin anew there, and a stop string that is cut is not seen.

        Args:
            params: `max_tokens` is that of the whole answer, and all outputs are deltas.
        """
        token_ids, request_id = list(prompt["prompt_token_ids"]), options.pop("request_id")
        left = params.max_tokens or _CONTEXTS * self.num_tokens
        times: RequestTimings | None = None
        finished, number = False, 0
        while not finished:
            made = list[int]()
            room = min(left, self.num_tokens - len(token_ids))
            part = dataclasses.replace(params, max_tokens=room, output_kind=RequestOutputKind.DELTA)
            like: TokensPrompt = {**prompt, "prompt_token_ids": token_ids}
            stream = self._llm.generate(like, part, f"{request_id}-{number}", **options)
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    new = output.outputs[0]
                    made += new.token_ids
                    room, left = room - len(new.token_ids), left - len(new.token_ids)
                    finished = output.finished and (
                        new.finish_reason != "length" or left <= 0 or room > 0
                    )
                    if output.finished:
                        times = output.metrics.engine = _together(times, output.metrics.engine)
                    if output.finished and not finished:
                        token_ids = self._shifted(self._without_part(token_ids + made, new))
                    output.finished, output.prompt_token_ids = finished, prompt["prompt_token_ids"]
                    yield output
            number += 1

    def _shifted(self, token_ids: list[int]) -> list[int]:
        num_kept = min(self._num_kept, len(token_ids) - 4)
        num_dropped = min(len(token_ids) - 1, max(1, (len(token_ids) - num_kept) // 2))
        return self._without_middle(token_ids, len(token_ids) - num_dropped)

    def _without_part(self, token_ids: list[int], new: CompletionOutput) -> list[int]:
        """Without tokens at the end that are a part of a character: they are generated again."""
        bytes_of, end = self._llm.get_tokenizer().pieces.bytes_of, len(token_ids)
        while end and _ends_open(b"".join(map(bytes_of, token_ids[max(0, end - 4) : end]))):
            end -= 1
        if end < len(token_ids):
            new.text = new.text.rstrip(_PART)
            new.token_ids = new.token_ids[: end - len(token_ids)]
        return token_ids[:end]


async def joined(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """The deltas of a stream as one output."""
    texts, token_ids = list[str](), list[int]()
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            new = output.outputs[0]
            texts.append(new.text)
            token_ids += new.token_ids
    new.text, new.token_ids = "".join(texts), token_ids
    yield output


def _ends_open(data: bytes) -> bool:
    """Whether the last character has more bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])


def _together(before: RequestTimings | None, times: RequestTimings | None) -> RequestTimings | None:
    """Of an answer in parts: what a later one takes belongs to its tokens."""
    if before is None or times is None:
        return times
    return msgspec.structs.replace(before, finished_s=before.finished_s + times.finished_s)
