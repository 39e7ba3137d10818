"""GET /health, /ready, /version: do the engines make progress, and can they serve now?"""

from collections.abc import Callable, Iterable
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.engine_calls import Engine
from frontend.http.ask_engines import Resting, Silent, Unanswered, ask_engines
from frontend.http.event_stream import json_response
from frontend.http.operations import operation
from frontend.http.served_models import ServedModel
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
    settings: ServerSettings = request.app.state.settings
    found = await ask_engines(request, _state)
    states = [
        {name: _state_of(each, settings.health_timeout) for name, each in of_model.items()}
        for of_model in found
    ]
    is_good = all(
        each_model(state in good or isinstance(state, Resting) for state in of_model.values())
        for of_model in states
    )
    engines = {name: str(state) for of_model in states for name, state in of_model.items()}
    return json_response(Health(_OK if is_good else "error", engines), 200 if is_good else 503)


async def _state(_model: ServedModel, engine: Engine) -> str:
    state = (await engine.ping()).state
    if state is EngineState.RUNNING:
        return _DRAINING if engine.session.is_draining else _OK
    return state.value


def _state_of(answer: str | Unanswered, timeout_s: float) -> str:
    match answer:
        case str():
            return answer
        case Silent(is_connected=True):
            return (
                f"stuck: no step has ended within {timeout_s:g} s; see the daemon's log, or raise "
                "--health-timeout if its steps take longer"
            )
        case TimeoutError():
            return f"away: nothing answers within {timeout_s:g} s"
    return f"away: {answer}"


@operation("GET", "/version", gives=Version, needs_key=False)
async def get_version(_request: Request) -> Response:
    """The version of this server."""
    return json_response(Version(version("engine-core")))
