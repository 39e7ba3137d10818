"""GET /health, /ready, /version: do the engines make progress, and can they serve now?"""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import EngineClientError
from frontend.http.event_stream import json_response
from frontend.http.operations import Operation
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.settings import ServerSettings
from protocol.calls import EngineState

_OK = "ok"
_BUT_WELL = (_OK, EngineState.PAUSED.value, EngineState.ASLEEP.value)


class Health(msgspec.Struct, frozen=True):
    """`engines` by name: "ok", "paused", "asleep", of one that starts when it is asked for
    "stopped" or how far its start is, or what is wrong."""

    status: str
    engines: dict[str, str]


class Version(msgspec.Struct, frozen=True):
    version: str


class _Resting(str):
    """The state of an engine that is started by a request."""


async def health(request: Request) -> Response:
    """200: every engine is idle, paused or makes progress. 503 names those that do not."""
    return await _answer(request, _BUT_WELL)


async def ready(request: Request) -> Response:
    """200: every engine can serve a request now, or is started by one. 503 names those that are
    away, paused or asleep."""
    return await _answer(request, (_OK,))


async def _answer(request: Request, good: tuple[str, ...]) -> Response:
    models: ServedModels = request.app.state.models
    settings: ServerSettings = request.app.state.settings
    states = await asyncio.gather(*(_state(each, settings.health_timeout) for each in models))
    engines = {
        engine_name(model, number): str(state)
        for number, (model, state) in enumerate(zip(models, states, strict=True))
    }
    is_good = all(state in good or isinstance(state, _Resting) for state in states)
    return json_response(Health(_OK if is_good else "error", engines), 200 if is_good else 503)


def engine_name(model: ServedModel, number: int) -> str:
    return ", ".join(model.names) or f"engine {number}"


async def _state(model: ServedModel, timeout_s: float) -> str:
    is_connected = False
    if model.resting is not None:
        return _Resting(model.resting)
    try:
        async with asyncio.timeout(timeout_s):
            llm = await model.ready()
            is_connected = True
            state = (await llm.ping()).state
    except TimeoutError:
        if not is_connected:
            return f"away: nothing answers within {timeout_s:g} s"
        return (
            f"stuck: no step has ended within {timeout_s:g} s; see the daemon's log, or raise "
            "--health-timeout if its steps take longer"
        )
    except EngineClientError as error:
        return f"away: {error}"
    return _OK if state is EngineState.RUNNING else state.value


async def get_version(_request: Request) -> Response:
    """The version of this server."""
    return json_response(Version(version("engine-core")))


OPERATIONS = [
    Operation(method="GET", path="/health", handler=health, gives=Health, needs_key=False),
    Operation(method="GET", path="/ready", handler=ready, gives=Health, needs_key=False),
    Operation(method="GET", path="/version", handler=get_version, gives=Version, needs_key=False),
]
