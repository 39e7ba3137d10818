"""GET /health, /ready, /version: do the engines make progress, and can they serve now?"""

import asyncio
from collections.abc import Callable, Iterable
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.engine_calls import Engine
from frontend.errors import EngineClientError
from frontend.http.event_stream import json_response
from frontend.http.operations import operation
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.settings import ServerSettings
from protocol.calls import EngineState

_OK = "ok"
_DRAINING = "draining"
_BUT_WELL = (_OK, _DRAINING, EngineState.PAUSED.value, EngineState.ASLEEP.value)

_Rule = Callable[[Iterable[bool]], bool]


class Health(msgspec.Struct, frozen=True):
    """`engines` by name: "ok", "draining", "paused", "asleep"; "stopped" or how far its start is,
    of one that a request starts; or what is wrong."""

    status: str
    engines: dict[str, str]


class Version(msgspec.Struct, frozen=True):
    version: str


class _Resting(str):
    """The state of an engine that is started by a request."""


@operation("GET", "/health", gives=Health, needs_key=False)
async def health(request: Request) -> Response:
    """200: every engine is idle, paused or makes progress. 503 names those that do not."""
    return await _answer(request, _BUT_WELL, all)


@operation("GET", "/ready", gives=Health, needs_key=False)
async def ready(request: Request) -> Response:
    """200: an engine of every model can serve a request now, or is started by one. 503 names those
    that are away, draining, paused or asleep."""
    return await _answer(request, (_OK,), any)


async def _answer(request: Request, good: tuple[str, ...], each_model: _Rule) -> Response:
    models: ServedModels = request.app.state.models
    settings: ServerSettings = request.app.state.settings
    found = await asyncio.gather(
        *(_states(model, n, settings.health_timeout) for n, model in enumerate(models))
    )
    is_good = all(
        each_model(state in good or isinstance(state, _Resting) for state in states.values())
        for states in found
    )
    engines = {name: str(state) for states in found for name, state in states.items()}
    return json_response(Health(_OK if is_good else "error", engines), 200 if is_good else 503)


def engine_name(model: ServedModel, number: int, engine: Engine | None = None) -> str:
    """Of the model with this number. Of several engines each has its address, too."""
    name = ", ".join(model.names) or f"engine {number}"
    return name if engine is None else f"{name} at {engine.address}"


async def engines_of(model: ServedModel, number: int) -> dict[str, Engine]:
    """By name."""
    engines = await model.engines()
    if len(engines) == 1:
        return {engine_name(model, number): engines[0]}
    return {engine_name(model, number, each): each for each in engines}


async def _states(model: ServedModel, number: int, timeout_s: float) -> dict[str, str]:
    if model.resting is not None:
        return {engine_name(model, number): _Resting(model.resting)}
    try:
        async with asyncio.timeout(timeout_s):
            engines = await engines_of(model, number)
    except TimeoutError:
        return {engine_name(model, number): f"away: nothing answers within {timeout_s:g} s"}
    except EngineClientError as error:
        return {engine_name(model, number): f"away: {error}"}
    states = await asyncio.gather(*(_state(each, timeout_s) for each in engines.values()))
    return dict(zip(engines, states, strict=True))


async def _state(engine: Engine, timeout_s: float) -> str:
    is_connected = False
    try:
        async with asyncio.timeout(timeout_s):
            await engine.session.ready(waits=False)
            is_connected = True
            state = (await engine.ping()).state
    except TimeoutError:
        if not is_connected:
            return f"away: nothing answers within {timeout_s:g} s"
        return (
            f"stuck: no step has ended within {timeout_s:g} s; see the daemon's log, or raise "
            "--health-timeout if its steps take longer"
        )
    except EngineClientError as error:
        return f"away: {error}"
    if state is EngineState.RUNNING:
        return _DRAINING if engine.session.is_draining else _OK
    return state.value


@operation("GET", "/version", gives=Version, needs_key=False)
async def get_version(_request: Request) -> Response:
    """The version of this server."""
    return json_response(Version(version("engine-core")))
