"""A replica of the HTTP server: an actor of Ray Serve with our HTTP application as its ingress."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from engine_core.cluster.deployment import Deployment, ModelDeployment
from engine_core.cluster.directory_actor import DirectoryClient
from engine_core.cluster.keys import KeyFiles
from engine_core.cluster.replicated_model import ReplicatedModel
from frontend.http.api_keys import ApiKeys
from frontend.http.app import make_app
from frontend.http.served_models import ServedModels


class HttpReplica:
    """
    Args:
        api_keys: of the deployment file; None: everybody is answered.
        directory: the name of the deployment's directory.
        replicas: a handle of each model's.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        deployment: Deployment,
        api_keys: ApiKeys | None,
        directory: str,
        replicas: Sequence[DeploymentHandle],
    ) -> None:
        self._deployment = deployment
        self._api_keys = api_keys
        self._directory = DirectoryClient(directory)
        self._key_files = KeyFiles(await self._directory.keys())
        self._models = [
            self._model(*each) for each in zip(deployment.models, replicas, strict=True)
        ]
        self._follower = asyncio.create_task(self._follow_the_directory())

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Serve's name
        server = self._deployment.server
        app: Any = make_app(ServedModels(self._models), server, self._api_keys)
        if server.forwarded_allow_ips is not None:
            app = ProxyHeadersMiddleware(app, server.forwarded_allow_ips)
        served: ASGIApp = app
        return served

    def _model(self, model: ModelDeployment, replicas: DeploymentHandle) -> ReplicatedModel:
        async def start() -> None:
            await replicas.start.remote()

        return ReplicatedModel(
            model.served_name,
            keys=self._key_files.of_client,
            start=start,
            may_rest=not model.min_replicas,
            startup_timeout_s=model.startup_timeout_s,
            reconnect_timeout_s=self._deployment.http.reconnect_timeout_s,
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
