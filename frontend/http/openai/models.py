"""GET /v1/models."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import EngineClientError
from frontend.http.api_errors import unknown_model
from frontend.http.event_stream import json_response
from frontend.http.generation.answer_bodies import ModelCard, ModelList
from frontend.http.operations import operation
from frontend.http.served_models import ServedModel, served_models


@operation("GET", "/v1/models", gives=ModelList)
async def list_models(request: Request) -> Response:
    """The models of this server."""
    cards = [card for model in served_models(request) for card in await _cards(model)]
    return json_response(ModelList(data=cards))


@operation("GET", "/v1/models/{name:path}", gives=ModelCard)
async def get_model(request: Request) -> Response:
    """One model."""
    models = served_models(request)
    name = request.path_params["name"]
    for model in models:
        for card in await _cards(model):
            if card.id == name:
                return json_response(card)
    raise unknown_model(name, models.names())


async def _cards(model: ServedModel) -> list[ModelCard]:
    """One for each name and adapter; of an engine that is away without its length."""
    root, max_model_len = None, None
    try:
        info = (await model.ready()).model
        root, max_model_len = info.name, info.max_model_len
    except EngineClientError:
        pass
    parents = dict.fromkeys(model.names) | dict.fromkeys(model.adapters, root)
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
