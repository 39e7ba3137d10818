"""A replica of the HTTP server: an actor of Ray Serve with our HTTP application as its ingress."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from frontend.cluster.deployment import HttpDeployment, ModelDeployment
from frontend.cluster.directory_actor import DirectoryClient
from frontend.cluster.keys import KeyFiles
from frontend.cluster.replicated_model import ReplicatedModel
from frontend.http.api_keys import ApiKeys
from frontend.http.app import make_app
from frontend.http.served_models import ServedModels
from frontend.http.settings import ServerSettings


@dataclasses.dataclass(frozen=True)
class ServedReplicas:
    """A model's replicas, as an HTTP replica needs to know them."""

    name: str
    may_rest: bool
    startup_timeout_s: float

    @classmethod
    def of(cls, model: ModelDeployment) -> Self:
        return cls(model.served_name, not model.min_replicas, model.startup_timeout_s)


class HttpReplica:
    """
    Args:
        api_keys: of the deployment file; None: everybody is answered.
        replicas: a handle of each model's.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        models: Sequence[ServedReplicas],
        http: HttpDeployment,
        server: ServerSettings,
        api_keys: ApiKeys | None,
        replicas: Sequence[DeploymentHandle],
    ) -> None:
        self._http = http
        self._server = server
        self._api_keys = api_keys
        self._directory = DirectoryClient()
        self._key_files = KeyFiles(await self._directory.keys())
        self._models = [self._model(*each) for each in zip(models, replicas, strict=True)]
        self._follower = asyncio.create_task(self._follow_the_directory())

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Serve's name
        server = self._server
        app: Any = make_app(ServedModels(self._models), server, self._api_keys)
        if server.forwarded_allow_ips is not None:
            app = ProxyHeadersMiddleware(app, server.forwarded_allow_ips)
        served: ASGIApp = app
        return served

    def _model(self, model: ServedReplicas, replicas: DeploymentHandle) -> ReplicatedModel:
        async def start() -> None:
            await replicas.start.remote()

        return ReplicatedModel(
            model.name,
            start=start,
            may_rest=model.may_rest,
            startup_timeout_s=model.startup_timeout_s,
            client_options={
                "keys": self._key_files.of_client,
                "routing_policy": self._http.routing_policy,
                "reconnect_timeout_s": self._http.reconnect_timeout_s,
            },
        )

    async def _follow_the_directory(self) -> None:
        version = None
        while True:
            version, addresses = await self._directory.changes(version)
            for model in self._models:
                model.set_addresses(tuple(addresses.get(model.names[0], ())))

    async def __del__(self) -> None:
        self._follower.cancel()
        self._key_files.close()
