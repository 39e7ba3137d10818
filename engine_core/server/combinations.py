"""What a pooling request or a beam search cannot be combined with: refused by name."""

from collections.abc import Mapping

from engine_core.errors import RequestRefused
from protocol.errors import ErrorCode
from protocol.pooling import POOLING_SAMPLING
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams


def check_pooling(request: EngineRequest) -> None:
    """Of a request that is pooled. Raises RequestRefused: it asks for more than that."""
    _refuse_unsupported(
        "a pooling request",
        {
            "sampling_params": request.sampling_params != POOLING_SAMPLING,
            "num_sequences": request.num_sequences != 1,
            "beam_search": request.beam_search is not None,
            "output_token_ids": bool(request.output_token_ids),
        },
    )


def check_beam_search(
    request: EngineRequest, beams: BeamSearchParams, has_processors: bool, no_beams: str
) -> None:
    """Of a beam search, in an engine with or without logits processors. `no_beams`: an option of
    the engine's for which there is none. Raises RequestRefused: a
    parameter has no meaning for beams."""
    if request.num_sequences != beams.beam_width:
        raise RequestRefused(
            ErrorCode.INVALID_REQUEST,
            f"num_sequences is {request.num_sequences}, beam_width is {beams.beam_width}; "
            "they must be equal",
        )
    params = request.sampling_params
    if params.temperature != 0.0:
        raise RequestRefused(
            ErrorCode.INVALID_REQUEST,
            f"temperature is {params.temperature} in a beam search, which draws nothing; set "
            "it to 0",
        )
    unsupported = {
        "output_token_ids (send the prompt again)": bool(request.output_token_ids),
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "logprob_token_ids": bool(params.logprob_token_ids),
        "min_tokens": params.min_tokens != 0,
        "bad_words": bool(params.bad_words),
        "thinking_token_budget": params.thinking is not None,
        "repetition_detection": params.repetition_detection is not None,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "structured_outputs": params.structured_output is not None,
        "extra_args": params.extra_args is not None,
        "logits processors, which this engine was started with": has_processors,
        f"{no_beams}, which this engine was started with": bool(no_beams),
        "top_k": params.top_k != 0,
        "top_p": params.top_p != 1.0,
        "min_p": params.min_p != 0.0,
        "samplers of llama.cpp": params.chain is not None,
    }
    _refuse_unsupported("a beam search", unsupported)


def _refuse_unsupported(what: str, is_asked: Mapping[str, bool]) -> None:
    for name, is_set in is_asked.items():
        if is_set:
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED, f"{what} does not support {name}; omit it"
            )
