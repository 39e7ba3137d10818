"""What a request must be like, whatever the model. Checks only."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from protocol.sampling import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from engine_core.scheduler.request import Request

_MAX_TOKEN_ID = 2**31 - 1


def checked_token_ids(name: str, token_ids: Sequence[int]) -> "array[int]":
    """Token ids as a flat array of 4 bytes each.

    Raises:
        ValueError: an id below 0 or above 2**31 - 1, or no whole number.
    """
    try:
        flat = array("I", token_ids)  # faster than "i", and the bytes are the same
        is_right = not flat or int(np.frombuffer(flat, np.uint32).max()) <= _MAX_TOKEN_ID
    except OverflowError:
        is_right = False
    except TypeError as error:
        raise ValueError(f"{name} holds something that is not a token id: {error}") from error
    if not is_right:
        raise ValueError(
            f"{name} holds ids from {min(token_ids)} to {max(token_ids)}, they must be from 0 to "
            f"{_MAX_TOKEN_ID}; use the model's own tokenizer"
        )
    return flat


def check_request(
    request: "Request",
    beam_search: BeamSearchParams | None,
    num_output_tokens: int,
    max_model_len: int | None,
) -> None:
    """
    Raises:
        ValueError: a field outside its limits, or two that contradict each other.
    """
    if not request.request_id:
        raise ValueError("request_id is empty; give each request an id of its own")
    if not isinstance(request.sampling_params, SamplingParams):
        raise ValueError(
            f"sampling_params is {request.sampling_params!r}, it must be "
            "protocol.sampling.SamplingParams"
        )
    num_prompt_tokens = len(request.prompt)
    if not num_prompt_tokens:
        raise ValueError("the prompt is empty; send at least one token")
    if max_model_len is not None and num_prompt_tokens >= max_model_len:
        raise ValueError(prompt_too_long(num_prompt_tokens, max_model_len))
    if request.num_sequences < 1:
        raise ValueError(f"num_sequences is {request.num_sequences}, it must be at least 1")
    if num_output_tokens and request.num_sequences > 1:
        raise ValueError(
            f"output_token_ids are given for num_sequences {request.num_sequences}; send one "
            "request a sequence to go on with"
        )
    if beam_search is not None and beam_search.beam_width != request.num_sequences:
        raise ValueError(
            f"num_sequences is {request.num_sequences}, the beam width {beam_search.beam_width}; "
            "make them equal"
        )


def prompt_too_long(num_tokens: int, max_model_len: int) -> str:
    """Why a prompt that leaves no room for one output token is refused."""
    return (
        f"prompt has {num_tokens} tokens, the limit is {max_model_len - 1} (max_model_len "
        f"{max_model_len} less one for the answer); shorten it or raise --max-model-len"
    )
