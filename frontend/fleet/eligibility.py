"""The engines that may have a request, of several: those that are there and could serve it."""

from frontend.engine.session import Arithmetic, EngineSession
from frontend.request_state import RequestState
from protocol.outputs import ModelInfo


def may_take(session: EngineSession, request: RequestState, ours: ModelInfo) -> bool:
    """Whether the engine is there and could serve the request, which was made for `ours`."""
    if session.welcome is None or not session.is_connected or session.is_draining:
        return False
    if session.is_paused and not request.has_started:
        return False
    model, wire = session.welcome.model, request.wire
    task = "generate" if wire.pooling_params is None else wire.pooling_params.task.value
    if task not in model.tasks:
        return False
    if wire.adapter is not None:
        fingerprint = session.adapters.get(wire.adapter)
        if fingerprint is None:
            return False
        if request.has_started and fingerprint != request.adapter_fingerprint:
            return False
    length = len(wire.prompt_token_ids) + wire.sampling_params.max_tokens
    tokenizers = {each.tokenizer and each.tokenizer.fingerprint for each in (ours, model)}
    return (
        len(tokenizers) == 1
        and model.vocab_size == ours.vocab_size
        and model.max_model_len >= min(length, ours.max_model_len)
        and model.max_num_seqs >= len(request.sequences)
    )


def needed_arithmetic(request: RequestState, arithmetic: Arithmetic | None) -> Arithmetic | None:
    """The arithmetic of engines that may go on with a request, which one of `arithmetic` had: its
    weights may have changed behind the request's last token. None: any, as it has not begun."""
    if arithmetic is None or not request.has_started:
        return None
    return request.weights_fingerprint or arithmetic[0], *arithmetic[1:]
