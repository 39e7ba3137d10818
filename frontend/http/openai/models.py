"""GET /v1/models, for clients of OpenAI's API and of Anthropic's."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import EngineClientError
from frontend.http.anthropic.models import asks_anthropic, model_of_card, models_of_cards
from frontend.http.api_errors import unknown_model
from frontend.http.event_stream import json_response
from frontend.http.generation.answer_bodies import ModelCard, ModelList
from frontend.http.operations import operation
from frontend.http.served_models import ServedModel, ServedPreset, served_models


@operation("GET", "/v1/models", gives=ModelList)
async def list_models(request: Request) -> Response:
    """The models of this server."""
    models = served_models(request).with_presets()
    cards = [card for model in models for card in await _cards(model)]
    listed = models_of_cards(cards) if asks_anthropic(request) else ModelList(data=cards)
    return json_response(listed)


@operation("GET", "/v1/models/{name:path}", gives=ModelCard)
async def get_model(request: Request) -> Response:
    """One model."""
    models = served_models(request)
    name = request.path_params["name"]
    for model in models.with_presets():
        for card in await _cards(model):
            if card.id == name:
                return json_response(model_of_card(card) if asks_anthropic(request) else card)
    raise unknown_model(name, models.known_names())


async def _cards(model: ServedModel) -> list[ModelCard]:
    """One for each name and adapter; of an engine that is away without its length."""
    root, max_model_len = None, None
    try:
        info = (await model.ready()).model
        root, max_model_len = info.name, info.max_model_len
    except EngineClientError:
        pass
    of = model.parent if isinstance(model, ServedPreset) else None
    parents = dict.fromkeys(model.names, of) | dict.fromkeys(model.adapters, root)
    return [
        ModelCard(
            id=name,
            created=model.created_s,
            root=name if parent else root or name,
            parent=parent,
            max_model_len=max_model_len,
        )
        for name, parent in parents.items()
    ]
