"""Requests without a client's message in between."""

from types import SimpleNamespace

from engine_core.scheduler import Request
from engine_core.scheduler.records.prompt_content import PromptContent
from engine_core.scheduler.records.prompt_report import PromptReport
from protocol.requests import EngineRequest

_OF_THE_ENGINE = ("client_index", "arrival_time", "eos_token_ids")


def new_request(
    *, pools_all_states=False, prompt_embeds=(), content_spans=(), mm_features=(), **fields
) -> Request:
    """From the fields of a message and what the engine adds to it."""
    added = {name: fields.pop(name) for name in _OF_THE_ENGINE if name in fields}
    content = PromptContent(embeds=prompt_embeds, features=mm_features, spans=content_spans)
    pooler = SimpleNamespace(
        needs_all_states=lambda params: pools_all_states, num_held_values=lambda params, count: 0
    )
    message = EngineRequest(**fields)
    return Request(message, content=content, report=PromptReport.of(message, pooler), **added)
