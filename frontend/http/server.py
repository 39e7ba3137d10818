"""The process: listens, serves, and stops when it is told to."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import uvicorn

from frontend.async_llm import AsyncLLM
from frontend.http.app import make_app
from frontend.http.metrics.exposition import MetricsNames
from frontend.http.served_models import ServedModel, ServedModels


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """
    Args:
        addresses: of engines, with the names of their models, if others than the engine's own.
        connect_timeout_s: for an engine to answer a request that comes while it is away.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    addresses: tuple[tuple[str | None, tuple[str, ...]], ...] = ((None, ()),)
    connect_timeout_s: float = 10.0
    metrics_names: MetricsNames = "engine-core"


def serve(settings: ServerSettings) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code."""
    models = ServedModels(
        ServedModel(
            lambda address=address: AsyncLLM(  # type: ignore[misc]
                address,
                client_name="engine-client http",
                connect_timeout_s=settings.connect_timeout_s,
            ),
            names,
        )
        for address, names in settings.addresses
    )
    config = uvicorn.Config(
        make_app(models, settings.metrics_names),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
        timeout_graceful_shutdown=30,
    )
    sys.stderr.write(f"http://{settings.host}:{settings.port}/v1\n")
    uvicorn.Server(config).run()
    return 0
