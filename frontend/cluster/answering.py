"""Lines asked of an engine in this process, by the server's routes without a socket."""

import contextlib
from collections.abc import AsyncIterator, Sequence

from frontend.async_llm import AsyncLLM
from frontend.batch.answerer import Answerer
from frontend.engine.daemon import ChildDaemon
from frontend.http.app import make_app
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.settings import ServerSettings

_STARTUP_S = 3600.0


@contextlib.asynccontextmanager
async def answering(llm: AsyncLLM, names: Sequence[str] = ()) -> AsyncIterator[Answerer]:
    """Closes the client in the end.

    Args:
        names: that lines may give as `model`, beside none; default: the engine's own.
    """
    settings = ServerSettings(
        max_body_size=2**40, max_concurrent_requests=2**31, health_timeout=60.0
    )
    app = make_app(ServedModels([ServedModel(lambda: llm, names)]), settings)
    async with app.router.lifespan_context(app):
        yield Answerer(app)


async def launch(model: str, engine_options: Sequence[str]) -> AsyncLLM:
    """A client of an engine of its own, which is started again when it dies.
    Raises EngineStartError: it did not get ready."""
    child = ChildDaemon(["--model", model, "--supervise", *engine_options])
    return await AsyncLLM.launched(
        child, client_name="engine-core batch", startup_timeout_s=_STARTUP_S
    )


def names_of(model: str | None, llm: AsyncLLM) -> list[str]:
    """The names by which lines may call it: as it was given, and its own."""
    return list(dict.fromkeys(filter(None, (model, llm.model.name))))
