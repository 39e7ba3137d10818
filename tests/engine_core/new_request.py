"""Requests without a client's message in between."""

from engine_core.scheduler import Request
from protocol.requests import EngineRequest

_OF_THE_ENGINE = (
    *("client_index", "arrival_time", "eos_token_ids", "pooler"),
    *("prompt_embeds", "content_spans", "mm_features"),
)


def new_request(*, pools_all_states=False, num_held_values=0, **fields) -> Request:
    """From the fields of a message and what the engine adds to it."""
    added = {name: fields.pop(name) for name in _OF_THE_ENGINE if name in fields}
    request = Request(EngineRequest(**fields), **added)
    request.pools_all_states, request.num_held_values = pools_all_states, num_held_values
    return request
