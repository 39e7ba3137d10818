"""Requests without a client's message in between."""

from types import SimpleNamespace

from engine_core.scheduler import Request
from engine_core.scheduler.prompt_content import PromptContent
from protocol.requests import EngineRequest

_OF_THE_ENGINE = ("client_index", "arrival_time", "eos_token_ids", "pooler", "content")


def new_request(
    *, pools_all_states=False, prompt_embeds=(), content_spans=(), mm_features=(), **fields
) -> Request:
    """From the fields of a message and what the engine adds to it."""
    added = {name: fields.pop(name) for name in _OF_THE_ENGINE if name in fields}
    if prompt_embeds or content_spans or mm_features:
        added["content"] = PromptContent(
            embeds=prompt_embeds, features=mm_features, spans=content_spans
        )
    if pools_all_states:
        added["pooler"] = SimpleNamespace(
            needs_all_states=lambda params: True, num_held_values=lambda params, num_tokens: 0
        )
    return Request(EngineRequest(**fields), **added)
