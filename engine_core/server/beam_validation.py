"""What a beam search may ask for. What it could not honour is refused by name, never ignored."""

from engine_core.errors import RequestRefused
from protocol.errors import ErrorCode
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams


def check_beam_search(request: EngineRequest, beams: BeamSearchParams, *, vocab_size: int) -> None:
    """
    Raises:
        RequestRefused: a beam search that this engine cannot run as it was asked for.
    """
    if request.num_sequences != beams.beam_width:
        raise RequestRefused(
            ErrorCode.INVALID_REQUEST,
            f"num_sequences is {request.num_sequences}, beam_width is {beams.beam_width}; "
            "they must be equal",
        )
    if 2 * beams.beam_width > vocab_size:
        raise RequestRefused(
            ErrorCode.INVALID_REQUEST,
            f"beam_width is {beams.beam_width}, the limit is half the vocabulary, "
            f"{vocab_size // 2}; lower it",
        )
    params = request.sampling_params
    if params.temperature != 0.0:
        raise RequestRefused(
            ErrorCode.INVALID_REQUEST,
            f"temperature is {params.temperature} in a beam search, which draws nothing; set it "
            "to 0",
        )
    asked = {
        "output_token_ids (send the prompt again)": bool(request.output_token_ids),
        "logprobs": params.logprobs is not None,
        "min_tokens": params.min_tokens != 0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "top_k": params.top_k != 0,
        "top_p": params.top_p != 1.0,
        "min_p": params.min_p != 0.0,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED, f"a beam search does not support {name}; omit it"
            )
