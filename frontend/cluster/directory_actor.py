"""The directory as an actor, and its client, which outlives the actor's restarts."""

import asyncio
import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from frontend.cluster.directory import EngineDirectory, Snapshot
from frontend.cluster.keys import make_keys

_NAME, _NAMESPACE = "directory", "engine-core"
_RETRY_S = 1.0


class _DirectoryActor(EngineDirectory):
    def __init__(self, keys: dict[str, bytes]) -> None:
        is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(keys, is_restarted=is_restarted)


def ensure_directory() -> None:
    """Start it, unless it is there: a deployment that changes keeps its keys."""
    ray.remote(_DirectoryActor).options(
        name=_NAME,
        namespace=_NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=10_000,
        num_cpus=0,
    ).remote(make_keys())


def remove_directory() -> None:
    with contextlib.suppress(ValueError, RayError):  # there is none
        ray.kill(ray.get_actor(_NAME, _NAMESPACE))


class DirectoryClient:
    """Calls of the directory; each is tried until it is answered."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def keys(self) -> dict[str, bytes]:
        keys: dict[str, bytes] = await self._call("keys")
        return keys

    async def report(self, model: str, address: str) -> None:
        await self._call("report", model, address)

    async def leave(self, model: str, address: str) -> None:
        await self._call("leave", model, address)

    async def changes(self, version: tuple[float, int] | None) -> Snapshot:
        snapshot: Snapshot = await self._call("changes", version)
        return snapshot

    async def _call(self, method: str, *arguments: object) -> Any:
        while True:
            try:
                if self._actor is None:
                    self._actor = ray.get_actor(_NAME, _NAMESPACE)
                return await getattr(self._actor, method).remote(*arguments)
            except (ValueError, RayError):  # it is away, or starts
                self._actor = None
                await asyncio.sleep(_RETRY_S)
