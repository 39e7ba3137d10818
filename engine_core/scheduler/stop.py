"""When a sequence is over. Decisions only; nothing is freed here."""

from engine_core.scheduler.request import Request
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence import Sequence


def append_until_stop(sequence: Sequence, token_ids: list[int], max_model_len: int) -> list[int]:
    """Append sampled tokens up to and including the one that ends the sequence.

    Sets `status` and `stop_reason` if one does. Returns the tokens that were appended: what was
    sampled behind the last one is dropped.
    """
    for count, token_id in enumerate(token_ids, start=1):
        sequence.append_output_token(token_id)
        if check_stop(sequence, max_model_len):
            return token_ids[:count]
    return token_ids


def check_stop(sequence: Sequence, max_model_len: int) -> bool:
    """Whether the last output token ends the sequence; sets `status` and `stop_reason` if so.

    End-of-sequence comes before stop tokens, both before the limits, and both count only from
    `min_tokens` on.
    """
    request = sequence.request
    params = request.sampling_params
    num_tokens = sequence.num_tokens
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens and num_output_tokens >= params.min_tokens:
        last = sequence.last_token_id
        if last in request.eos_token_ids and not params.ignore_eos:
            sequence.status = RequestStatus.FINISHED_STOPPED
            return True
        if last in params.stop_token_ids:
            sequence.status = RequestStatus.FINISHED_STOPPED
            sequence.stop_reason = last
            return True
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        sequence.status = RequestStatus.FINISHED_LENGTH
        return True
    return False


def stop_token_ids(request: Request) -> list[int]:
    """Every token that may end a sequence of the request."""
    params = request.sampling_params
    if params.ignore_eos:
        return [*params.stop_token_ids]
    return [*request.eos_token_ids, *params.stop_token_ids]
