"""What this engine can serve: a request is checked once, before the scheduler sees it.

Must not know sockets or the scheduler; a refusal is an exception that names value, limit and
next action.
"""

import dataclasses
import re
from typing import Literal, NoReturn

from engine_core.errors import RequestRefused
from engine_core.server.beam_validation import check_beam_search
from protocol.errors import ErrorCode, InvalidParameter, PromptTooLong
from protocol.limits import ModelLimits
from protocol.requests import EngineRequest

_MAX_NAME_CHARS = 256
_SEQUENCE_NAME = re.compile(r"#\d+\Z", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestValidator(ModelLimits):
    """What a request is measured against. Counts are in tokens, but for `max_num_seqs`."""

    max_num_seqs: int
    """Most sequences of a request: all of them run at once."""
    scheduling_policy: Literal["fcfs", "priority", "fair"]

    def check(self, request: EngineRequest) -> None:
        """
        Raises:
            RequestRefused: the request cannot be served by this engine.
        """
        _check_name("request_id", request.request_id)
        if _SEQUENCE_NAME.search(request.request_id):
            _refuse(
                f"request_id {request.request_id!r} ends like the name of a request's further "
                "sequence; let it not end with # and a number"
            )
        _check_features(request)
        self._check_turn(request)
        self._check_sequences(request)
        try:
            self.check_prompt(request.prompt_token_ids)
            self.check_token_ids("output_token_ids", request.output_token_ids)
            self.check_sampling(request.sampling_params)
        except PromptTooLong as error:
            _refuse(str(error), ErrorCode.PROMPT_TOO_LONG)
        except InvalidParameter as error:
            _refuse(str(error))
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens >= self.max_model_len:
            _refuse(
                f"prompt and delivered tokens are {num_tokens}, the limit is "
                f"{self.max_model_len - 1}; nothing is left to generate",
                ErrorCode.PROMPT_TOO_LONG,
            )

    def _check_turn(self, request: EngineRequest) -> None:
        """What only some policies look at."""
        for name, value, is_asked, policy in (
            ("priority", request.priority, request.priority != 0, "priority"),
            ("tenant", request.tenant, request.tenant is not None, "fair"),
        ):
            if is_asked and self.scheduling_policy != policy:
                _refuse(
                    f"{name} is {value!r}, and the scheduling policy is "
                    f"{self.scheduling_policy}, which does not look at it; omit it, or start the "
                    f"engine with --scheduling-policy {policy}",
                    ErrorCode.NOT_SUPPORTED,
                )
        if request.tenant is not None:
            _check_name("tenant", request.tenant)

    def _check_sequences(self, request: EngineRequest) -> None:
        num_sequences = request.num_sequences
        if not 1 <= num_sequences <= self.max_num_seqs:
            _refuse(
                f"num_sequences is {num_sequences}, it must be from 1 to max_num_seqs "
                f"{self.max_num_seqs}; ask for fewer or raise --max-num-seqs"
            )
        if request.beam_search is not None:
            check_beam_search(request, request.beam_search, vocab_size=self.vocab_size)
        elif num_sequences > 1 and request.output_token_ids:
            _refuse(
                f"output_token_ids with num_sequences {num_sequences}: which sequence they belong "
                "to is not said; resume each sequence as a request of its own"
            )


def _check_features(request: EngineRequest) -> None:
    """What the wire can say and this engine does not do yet is refused by name."""
    asked = {
        "adapter": request.adapter is not None,
        "prompt_embeds": request.prompt_embeds is not None,
        "multimodal_inputs": bool(request.multimodal_inputs),
    }
    for name, is_asked in asked.items():
        if is_asked:
            _refuse(f"this engine does not support {name}; omit it", ErrorCode.NOT_SUPPORTED)


def _check_name(name: str, value: str) -> None:
    if not 0 < len(value) <= _MAX_NAME_CHARS:
        _refuse(f"{name} has {len(value)} characters, it must have from 1 to {_MAX_NAME_CHARS}")


def _refuse(message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> NoReturn:
    raise RequestRefused(code, message)
