"""When a request is over. Decisions only; nothing is freed here."""

from engine_core.scheduler.request import Request
from engine_core.scheduler.request_status import RequestStatus


def append_until_stop(request: Request, token_ids: list[int], max_model_len: int) -> list[int]:
    """Append sampled tokens to the request up to and including the one that ends it.

    Sets `status` and `stop_reason` if one does. Returns the tokens that were appended: what was
    sampled behind the last one is dropped.
    """
    for count, token_id in enumerate(token_ids, start=1):
        request.append_output_token(token_id)
        if check_stop(request, max_model_len):
            return token_ids[:count]
    return token_ids


def check_stop(request: Request, max_model_len: int) -> bool:
    """Whether the request's last output token ends it; sets `status` and `stop_reason` if so.

    End-of-sequence comes before stop tokens, both before the limits, and both count only from
    `min_tokens` on.
    """
    params = request.sampling_params
    num_output_tokens = request.num_tokens - request.num_prompt_tokens
    if num_output_tokens and num_output_tokens >= params.min_tokens:
        last = request.all_token_ids[-1]
        if last in request.eos_token_ids and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if last in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = last
            return True
    if num_output_tokens >= params.max_tokens or request.num_tokens >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH
        return True
    return False
