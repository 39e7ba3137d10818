"""GET /health, /ready, /version: is the engine making progress?"""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import EngineClientError
from frontend.http.event_stream import json_response
from frontend.http.served_models import ServedModel, ServedModels

_ANSWER_S = 5.0
"""An engine answers a ping between two steps; one that takes longer is stuck."""


class Health(msgspec.Struct, frozen=True):
    """`engines` by name: "ok", or what is wrong."""

    status: str
    engines: dict[str, str]


class Version(msgspec.Struct, frozen=True):
    version: str


async def health(request: Request) -> Response:
    """200: every engine is idle or makes progress. 503 names those that do not."""
    models: ServedModels = request.app.state.models
    states = await asyncio.gather(*(_state(model) for model in models))
    engines = {
        ", ".join(model.names) or f"engine {number}": state
        for number, (model, state) in enumerate(zip(models, states, strict=True))
    }
    is_well = all(state == "ok" for state in states)
    return json_response(Health("ok" if is_well else "error", engines), 200 if is_well else 503)


async def _state(model: ServedModel) -> str:
    try:
        async with asyncio.timeout(_ANSWER_S):
            await (await model.ready()).ping()
    except TimeoutError:
        return f"stuck or away: no answer within {_ANSWER_S:g} s"
    except EngineClientError as error:
        return str(error)
    return "ok"


async def get_version(_request: Request) -> Response:
    """The version of this server."""
    return json_response(Version(version("engine-core")))
