"""What chat completions and completions do alike: usage, finish reasons, log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from frontend.errors import EngineClientError
from frontend.http.exchange import Exchange, current_exchange
from frontend.http.openai.requests import StreamOptions
from frontend.http.openai.responses import (
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from frontend.outputs import CompletionOutput, Logprob, RequestOutput
from frontend.tokenizer import Tokenizer


class EngineFailure(EngineClientError):
    """The engine ended the request with reason "error"; the text is its detail."""


class Answer:
    """Id, time and usage of one answer, of one or several requests to the engine."""

    def __init__(self, prefix: str, request_id: str | None, options: StreamOptions | None) -> None:
        self._exchange = current_exchange.get() or Exchange()
        self.id = f"{prefix}-{request_id or self._exchange.request_id}"
        self.created_s = int(time.time())
        self._options = options or StreamOptions()
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._num_generated = 0

    def count(self, index: int, output: RequestOutput) -> None:
        """Each delta once."""
        if index not in self._prompt_tokens:
            self._prompt_tokens[index] = len(output.prompt_token_ids)
            self._exchange.num_prompt_tokens += len(output.prompt_token_ids)
        self._cached_tokens[index] = output.num_cached_tokens or 0
        for each in output.outputs:
            self._num_generated += len(each.token_ids)
        self._exchange.num_output_tokens = self._num_generated

    def usage(self) -> Usage:
        prompt = sum(self._prompt_tokens.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._num_generated,
            total_tokens=prompt + self._num_generated,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens.values())),
        )

    @property
    def includes_usage(self) -> bool:
        return self._options.include_usage

    @property
    def always_includes_usage(self) -> bool:
        return self._options.continuous_usage_stats

    def usage_so_far(self) -> Usage | None:
        return self.usage() if self.always_includes_usage else None


def finish_reason(output: CompletionOutput) -> str | None:
    """
    Raises:
        EngineFailure: it failed.
    """
    if output.finish_reason == "error":
        raise EngineFailure(output.detail or "the request failed in the engine")
    return output.finish_reason


def token_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob]],
    num_top: int,
    tokenizer: Tokenizer,
) -> list[TokenLogprob]:
    """One entry a token, as chat completions have them."""
    entries = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        tops = sorted(
            (c for c in candidates.items() if c[1].rank is not None and c[1].rank <= num_top),
            key=lambda candidate: candidate[1].rank or 0,
        )
        token, raw = token_text(token_id, tokenizer)
        entries.append(
            TokenLogprob(
                token,
                finite(candidates[token_id].logprob),
                raw,
                [
                    TopLogprob(text, finite(top.logprob), raw_top)
                    for top_id, top in tops
                    for text, raw_top in (token_text(top_id, tokenizer),)
                ],
            )
        )
    return entries


def token_text(token_id: int, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """A token's text, and the bytes of it."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    return text, list(text.encode())


def finite(logprob: float) -> float:
    """-inf is no JSON; OpenAI's lowest value."""
    return max(logprob, -9999.0)
