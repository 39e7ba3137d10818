"""What this engine can serve: a request is checked once, before the scheduler sees it.

Must not know sockets or the scheduler; a refusal is an exception that names value, limit and
next action.
"""

import dataclasses
from collections.abc import Collection
from typing import NoReturn

from engine_core.errors import RequestRefused
from protocol.errors import ErrorCode
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

_MAX_REQUEST_ID_CHARS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a request is measured against. Counts are in tokens."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int

    def check(self, request: EngineRequest) -> None:
        """
        Raises:
            RequestRefused: the request cannot be served by this engine.
        """
        if not 0 < len(request.request_id) <= _MAX_REQUEST_ID_CHARS:
            _refuse(
                f"request_id has {len(request.request_id)} characters, it must have from 1 to "
                f"{_MAX_REQUEST_ID_CHARS}"
            )
        _check_features(request)
        self._check_tokens(request)
        self._check_sampling(request.sampling_params)

    def _check_tokens(self, request: EngineRequest) -> None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            _refuse("the prompt is empty; send at least one token")
        if num_tokens >= self.max_model_len:
            _refuse(
                f"prompt has {num_tokens} tokens, the limit is {self.max_model_len - 1} "
                f"(max_model_len {self.max_model_len} less one for the answer); shorten it or "
                "raise --max-model-len",
                ErrorCode.PROMPT_TOO_LONG,
            )
        if num_tokens + len(request.output_token_ids) >= self.max_model_len:
            _refuse(
                f"prompt and delivered tokens are {num_tokens + len(request.output_token_ids)}, "
                f"the limit is {self.max_model_len - 1}; nothing is left to generate",
                ErrorCode.PROMPT_TOO_LONG,
            )
        self._check_ids("prompt_token_ids", request.prompt_token_ids)
        self._check_ids("output_token_ids", request.output_token_ids)

    def _check_sampling(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias)
        limit = self.vocab_size if self.max_logprobs < 0 else self.max_logprobs
        wanted = params.logprobs or 0
        if wanted > limit or (wanted < 0 <= self.max_logprobs):
            _refuse(
                f"logprobs is {wanted}, the limit is {limit}; ask for fewer or raise --max-logprobs"
            )

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            _refuse(
                f"{name} holds token id {wrong}, the vocabulary ends at {self.vocab_size - 1}; "
                "use this model's own tokenizer"
            )


def _check_features(request: EngineRequest) -> None:
    """What the wire can say and this engine does not do yet is refused by name."""
    asked = {
        "num_sequences above 1 (send one request a sequence)": request.num_sequences != 1,
        "adapter": request.adapter is not None,
        "prompt_embeds": request.prompt_embeds is not None,
        "multimodal_inputs": bool(request.multimodal_inputs),
        "priority (the policy is first come, first served)": request.priority != 0,
    }
    for name, is_asked in asked.items():
        if is_asked:
            _refuse(f"this engine does not support {name}; omit it", ErrorCode.NOT_SUPPORTED)


def _refuse(message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> NoReturn:
    raise RequestRefused(code, message)
