"""One question to every engine of the server, each with a time limit."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request

from frontend.engine_calls import Engine
from frontend.errors import EngineClientError
from frontend.http.served_models import ServedModel, served_models
from frontend.http.settings import ServerSettings

T = TypeVar("T")


class Resting(str):
    """The state of an engine that is started by a request."""


class Silent(TimeoutError):
    """Nothing came within the time limit."""

    def __init__(self, *, is_connected: bool) -> None:
        super().__init__()
        self.is_connected = is_connected


Unanswered = Resting | TimeoutError | EngineClientError


async def ask_engines(
    request: Request, ask: Callable[[ServedModel, Engine], Awaitable[T]]
) -> list[dict[str, T | Unanswered]]:
    """Answers by the engine's name, for each model; or why there is none."""
    settings: ServerSettings = request.app.state.settings

    async def of_model(model: ServedModel, number: int) -> dict[str, T | Unanswered]:
        if model.resting is not None:
            return {engine_name(model, number): Resting(model.resting)}
        try:
            async with asyncio.timeout(settings.health_timeout):
                engines = await model.engines()
        except (TimeoutError, EngineClientError) as error:
            return {engine_name(model, number): error}
        found = await asyncio.gather(*(of_engine(model, each) for each in engines))
        names = (engine_name(model, number, each, of=len(engines)) for each in engines)
        return dict(zip(names, found, strict=True))

    async def of_engine(model: ServedModel, engine: Engine) -> T | Unanswered:
        try:
            async with asyncio.timeout(settings.health_timeout):
                await engine.session.ready(waits=False)
                return await ask(model, engine)
        except TimeoutError:
            return Silent(is_connected=engine.session.is_connected)
        except EngineClientError as error:
            return error

    return await asyncio.gather(
        *(of_model(model, n) for n, model in enumerate(served_models(request)))
    )


def engine_name(model: ServedModel, number: int, engine: Engine | None = None, of: int = 1) -> str:
    """Of the model with this number. `of` several engines each has its address, too."""
    name = ", ".join(model.names) or f"engine {number}"
    return name if engine is None or of == 1 else f"{name} at {engine.address}"
