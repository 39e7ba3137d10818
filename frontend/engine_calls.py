"""Calls to an engine beside requests: its numbers, its caches, its state."""

import abc
from os import PathLike
from typing import TypeVar

from frontend.engine.session import EngineSession
from frontend.errors import InvalidInput, UnknownAdapter
from frontend.fleet.engine_group import EngineGroup
from frontend.request_options import LoRARequest
from protocol import calls
from protocol.explanations import RequestInfo

T = TypeVar("T")


class EngineCalls(abc.ABC):
    """
    Raises:
        CallRefused: each of them, if the engine refuses.
        EngineDied: it was lost before it answered.
        EngineUnavailable: it is not there.
    """

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        """Paths of adapters that this client has loaded, by name."""

    @property
    @abc.abstractmethod
    def session(self) -> EngineSession | EngineGroup:
        """The requests in flight and the connection, for callers that handle many at once."""

    async def _call(self, call: calls.AnyCall, result_type: type[T]) -> T:
        result = await self.session.call(call)
        assert isinstance(result, result_type)
        return result

    async def statistics(self) -> calls.EngineStatistics:
        """The engine's numbers, over all its clients."""
        return await self._call(calls.GetStatistics(), calls.EngineStatistics)

    async def request_info(self, request_id: str) -> RequestInfo:
        """A request's state and its reasons: an unfinished one of this client by the id that
        `generate` was given, any unfinished or lately finished one by the engine's id
        (`RequestMetrics.engine_request_id`). CallRefused if there is none."""
        request = self.session.requests.get(request_id)
        if request is not None and request.wire_ids:
            request_id = request.wire_ids[0]
        return await self._call(calls.GetRequestInfo(request_id=request_id), RequestInfo)

    async def request_ids(self) -> list[str]:
        """The engine's ids of all unfinished requests of all clients."""
        return (await self._call(calls.ListRequests(), calls.RequestList)).request_ids

    async def watch_scheduler(self, after_step_id: int = -1) -> calls.SchedulerSnapshot:
        """The scheduler behind a step: requests, KV blocks, statistics, and the steps after
        `after_step_id` since this client watches. Ask again at once: the engine answers at most 10
        times a second, and forgets a client that has not asked for 2 s. One call at a time.

        Of requests of others it shows no more than that they are there to a client that may not
        list them (docs/guides/security.md)."""
        call = calls.WatchScheduler(after_step_id=after_step_id)
        return await self._call(call, calls.SchedulerSnapshot)

    async def request_infos(self, tenant: str | None = None) -> calls.RequestInfos:
        """What `request_info` says, of all unfinished requests of all clients, or of a tenant and
        its users; over TCP without an admin's key of those of this key's tenant."""
        return await self._call(calls.GetRequests(tenant=tenant), calls.RequestInfos)

    async def reset_prefix_cache(self) -> int:
        """Evict all cached blocks that no request uses. Returns how many."""
        reset = await self._call(calls.ResetPrefixCache(), calls.PrefixCacheReset)
        return reset.num_blocks_evicted

    async def ping(self) -> calls.Pong:
        """A round trip through the engine's loop, which answers between two steps: its uptime, its
        last step and how long ago that was. An engine that hangs does not answer."""
        return await self._call(calls.Ping(), calls.Pong)

    async def pause_generation(self, *, mode: str = "keep") -> calls.EngineStatus:
        """Run no more steps, for all clients. Requests are accepted meanwhile, and wait.
        `mode`: what becomes of unfinished requests: "keep" (they go on afterwards), "wait" (this
        returns when those that have started have ended) or "abort". Raises CallRefused: an unknown
        mode; or with "wait" the engine was resumed too soon."""
        return await self._call(calls.PauseGeneration(mode=mode), calls.EngineStatus)

    async def resume_generation(self) -> calls.EngineStatus:
        """End a pause: streams go on. CallRefused if the engine is asleep."""
        return await self._call(calls.ResumeGeneration(), calls.EngineStatus)

    async def is_paused(self) -> bool:
        """Whether no steps run, because of a pause or a sleep."""
        return (await self.ping()).state is not calls.EngineState.RUNNING

    async def sleep(self, level: int = 1) -> calls.EngineStatus:
        """Give the KV cache's memory back to the system, at level 2 that of the weights, too.
        Requests wait, those that had started are computed again afterwards.
        Raises CallRefused: an unknown level, or this model cannot sleep so."""
        return await self._call(calls.Sleep(level=level), calls.EngineStatus)

    async def wake_up(self, tags: None = None) -> calls.EngineStatus:
        """End a sleep. After level 2 the weights are loaded from the model's files.

        Raises:
            CallRefused: they or the memory are not there; the engine sleeps on.
            InvalidInput: `tags`, vLLM's, which wakes up a part only.
        """
        if tags is not None:
            raise InvalidInput(
                f"this engine does not support wake_up(tags={tags!r}); omit it: after sleep(2) "
                "update_weights may be called before wake_up"
            )
        return await self._call(calls.WakeUp(), calls.EngineStatus)

    async def is_sleeping(self) -> bool:
        return (await self.ping()).state is calls.EngineState.ASLEEP

    async def update_weights(self, model: str, version: int | None = None) -> calls.EngineStatus:
        """Serve other weights of the same model. Requests go on with them from their next token;
        `RequestOutput.weights_versions` says which made their tokens.
        Raises CallRefused: they are not there, or do not fit; the engine serves what it did before.

        Args:
            model: a folder, file or known name, as for `engine-core --model`, where the engine is.
            version: larger than all before, or that of the same files; default: the next number.
        """
        call = calls.UpdateWeights(model=str(model), version=version)
        return await self._call(call, calls.EngineStatus)

    @property
    def adapters(self) -> list[str]:
        """Names that requests may give as `adapter`."""
        return sorted(self.session.adapters)

    async def know_adapter(self, adapter: LoRARequest | None) -> None:
        """Return once the engine knows it: it is loaded if it has a path and is not known by it.

        Raises:
            InvalidInput: the engine has none of this name, and no path is given.
            CallRefused: it cannot be loaded.
        """
        if adapter is None:
            return
        is_known = adapter.name in self.session.adapters
        if adapter.lora_path:
            if (
                not is_known
                or self._paths.get(adapter.name, adapter.lora_path) != adapter.lora_path
            ):
                await self.load_adapter(adapter.name, adapter.lora_path, load_inplace=is_known)
                self._paths[adapter.name] = adapter.lora_path
        elif not is_known:
            there = ", ".join(self.adapters[:8]) or "none"
            raise UnknownAdapter(
                f"the engine has no adapter {adapter.name!r:.100}, there are: {there}; start it "
                "with --adapter NAME=FOLDER, or load one"
            )

    async def load_adapter(
        self, name: str, path: str | PathLike[str], *, load_inplace: bool = False
    ) -> list[str]:
        """Read an adapter and serve it from now on. Returns the names of all.
        Raises CallRefused: it cannot be served, or the engine loads none while it serves.

        Args:
            path: a folder of PEFT's or a .gguf file, below the engine's --adapter-dir.
            load_inplace: another adapter of this name gives way.
        """
        call = calls.LoadAdapter(name=name, path=str(path), load_inplace=load_inplace)
        answer = await self._call(call, calls.AdapterList)
        return [each.name for each in answer.adapters]

    async def unload_adapter(self, name: str) -> list[str]:
        """Take no more requests for an adapter. Returns the names of the others.
        Raises CallRefused: there is none of this name."""
        answer = await self._call(calls.UnloadAdapter(name=name), calls.AdapterList)
        return [each.name for each in answer.adapters]

    async def drain(self) -> int:
        """Make the engine finish what it has and exit. Returns how many requests are left."""
        return (await self._call(calls.Drain(), calls.Draining)).num_requests_left


class Engine(EngineCalls):
    """One of a client's engines."""

    def __init__(self, address: str, session: EngineSession) -> None:
        super().__init__()
        self.address = address
        self._session = session

    @property
    def session(self) -> EngineSession:
        return self._session
