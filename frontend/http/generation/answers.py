"""What chat completions and completions do alike: usage, finish reasons, log-probabilities."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from frontend.errors import EngineClientError
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import DONE, event, in_pieces
from frontend.http.exchange import Exchange, current_exchange
from frontend.http.generation.answer_bodies import (
    CompletionTokensDetails,
    PromptLogprobList,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from frontend.http.generation.requests import GenerationRequest, StreamOptions
from frontend.logprobs import Logprob, LogprobEntries, PromptLogprobs
from frontend.outputs import CompletionOutput, RequestOutput
from frontend.text.tokenizer import Tokenizer

_MAX_LOGPROBS = 2**20
"""Most log-probabilities of an answer that is no stream: about 60 MiB of JSON."""
_TOKENS_AT_ONCE = 64
Body = TypeVar("Body", bound=msgspec.Struct)


class EngineFailure(EngineClientError):
    """The engine ended the request with reason "error"; the text is its detail."""


class TokenCounts:
    """Of one answer, of one or several requests to the engine; the access log has them too."""

    def __init__(self) -> None:
        self._exchange = current_exchange.get() or Exchange()
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._num_generated = 0
        self._drafts: dict[int, tuple[int, int]] = {}
        """Verified and accepted."""

    def count(self, index: int, output: RequestOutput) -> None:
        """Each delta once."""
        if index not in self._prompt_tokens:
            self._prompt_tokens[index] = len(output.prompt_token_ids)
            self._exchange.num_prompt_tokens += len(output.prompt_token_ids)
        self._cached_tokens[index] = output.num_cached_tokens or 0
        metrics = output.metrics
        self._drafts[index] = metrics.num_draft_tokens, metrics.num_accepted_tokens
        for each in output.outputs:
            self._num_generated += len(each.token_ids)
        self._exchange.num_output_tokens = self._num_generated

    def usage(self) -> Usage:
        prompt = sum(self._prompt_tokens.values())
        drafts = sum(number for number, _ in self._drafts.values())
        accepted = sum(number for _, number in self._drafts.values())
        details = CompletionTokensDetails(accepted, drafts - accepted) if drafts else UNSET
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._num_generated,
            total_tokens=prompt + self._num_generated,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens.values())),
            completion_tokens_details=details,
        )


class CompletionAnswer(TokenCounts):
    """Its bodies, whole or as events.

    Args:
        kind: before its id.
    """

    def __init__(self, kind: str, asked: GenerationRequest) -> None:
        super().__init__()
        self._id = f"{kind}-{asked.request_id or self._exchange.request_id}"
        self._created_s = int(time.time())
        self._options = asked.stream_options or StreamOptions()

    def body(self, form: type[Body], choices: list[Any], usage: Any, **more: Any) -> Body:
        same: dict[str, Any] = {"id": self._id, "created": self._created_s}
        return form(**same, model=self._exchange.model, choices=choices, usage=usage, **more)

    def event(
        self, form: type[Body], choices: list[Any], *, counts: bool = True, **more: Any
    ) -> bytes:
        """
        Args:
            counts: whether it says the usage so far, if that was asked for.
            more: fields of this one.
        """
        usage: Any = None if self._options.include_usage else UNSET
        if counts and self.counts_in_events:
            usage = self.usage()
        return event(self.body(form, choices, usage, **more))

    @property
    def counts_in_events(self) -> bool:
        """Whether every event says the usage so far."""
        return bool(self._options.continuous_usage_stats)

    def end(self, form: type[Body], **more: Any) -> bytes:
        """The last of its events. `more`: see `event`."""
        if not self._options.include_usage:
            return DONE
        return event(self.body(form, [], self.usage(), **more)) + DONE


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
    tokenizer: Tokenizer | None,
    *,
    skip_special_tokens: bool = True,
    as_ids: bool = False,
) -> Any:
    """One entry a token, as chat completions have them; in JSON. Bytes are what the token adds to
    the text, perhaps a part of a character: joined they are the text.

    Args:
        tokenizer: None: tokens have no bytes.
        as_ids: tokens are named by their ids, as they are without a tokenizer.
    """
    pieces = None if tokenizer is None else tokenizer.pieces
    skipped: Collection[int] = ()
    if pieces is not None and skip_special_tokens:
        skipped = pieces.special_token_ids

    def added(token_id: int) -> list[int] | None:
        if pieces is None:
            return None
        return [] if token_id in skipped else list(pieces.bytes_of(token_id))

    def named(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids or pieces is None else pieces.text(token_id)

    def entry(token_id: int, candidates: Mapping[int, Logprob]) -> TokenLogprob:
        tops = sorted(
            (c for c in candidates.items() if c[1].rank is not None and c[1].rank <= num_top),
            key=lambda candidate: candidate[1].rank or 0,
        )
        return TokenLogprob(
            named(token_id),
            finite(candidates[token_id].logprob),
            added(token_id),
            [TopLogprob(named(each), finite(top.logprob), added(each)) for each, top in tops],
        )

    return in_pieces(map(entry, token_ids, logprobs), _TOKENS_AT_ONCE)


def prompt_logprobs(found: PromptLogprobs | None) -> PromptLogprobList:
    """Log-probabilities of a prompt as vLLM has them, in JSON."""
    entries = (
        entry and {each: replace(one, logprob=finite(one.logprob)) for each, one in entry.items()}
        for entry in found or ()
    )
    return in_pieces(entries, _TOKENS_AT_ONCE)  # type: ignore[no-any-return]


def num_logprobs(output: RequestOutput) -> int:
    """The number of log-probabilities of its prompt and its samples."""
    parts = (output.prompt_logprobs, *(each.logprobs for each in output.outputs))
    return sum(each.num_entries for each in parts if isinstance(each, LogprobEntries))


def check_size(num_logprobs: int) -> int:
    """The number itself.

    Raises:
        ApiError: too many for one answer.
    """
    if num_logprobs > _MAX_LOGPROBS:
        raise ApiError(
            400,
            f"the answer would have {num_logprobs} log-probabilities or more, the limit is "
            f"{_MAX_LOGPROBS}; ask for fewer a token, send fewer or shorter prompts, or set "
            "stream=true for those of sampled tokens",
            param="logprobs",
        )
    return num_logprobs


def token_name(token_id: int, tokenizer: Tokenizer, *, as_id: bool = False) -> str:
    """A token's text; of a part of a character its bytes, as OpenAI's completions have them.
    `as_id`: its id instead."""
    if as_id:
        return f"token_id:{token_id}"
    raw = tokenizer.pieces.bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """-inf is no JSON; OpenAI's lowest value."""
    return max(logprob, -9999.0)
