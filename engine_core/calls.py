"""The calls about requests, cache and numbers, which every engine answers."""

from msgspec.structs import replace

from engine_core.errors import RequestRefused
from engine_core.lifecycle import Lifecycle
from engine_core.observers.base import EnginePart, Handler, Reply
from engine_core.scheduler import Scheduler
from engine_core.scheduler.report.prompt_changes import PromptChanges
from engine_core.server.clients import Client, ClientRegistry
from engine_core.server.validation import NO_ADAPTERS
from protocol import calls
from protocol.errors import ErrorCode
from protocol.explanations import RequestInfo

_NOT_SERVED: dict[type, str] = {
    calls.LoadAdapter: NO_ADAPTERS,
    calls.UnloadAdapter: NO_ADAPTERS,
    calls.WatchCache: "WatchCache: this model keeps nothing between steps; there is nothing to "
    "watch",
}
"""Calls of parts that not every engine has."""


class BasicCalls(EnginePart):
    """First among the parts, so that the calls it refuses are those that no other part answers."""

    def __init__(self, scheduler: Scheduler, clients: ClientRegistry, lifecycle: Lifecycle) -> None:
        self._scheduler = scheduler
        self._clients = clients
        self._lifecycle = lifecycle

    def handlers(self) -> dict[type, Handler]:
        return dict.fromkeys(_NOT_SERVED, _refuse) | {
            calls.GetStatistics: lambda *_: self.loop.statistics(),
            calls.ResetPrefixCache: self._reset_prefix_cache,
            calls.Drain: self._drain,
            calls.ListRequests: lambda *_: calls.RequestList(
                request_ids=[name for each in self._clients for name in sorted(each.request_ids)]
            ),
            calls.GetRequestInfo: self._explain,
            calls.GetRequests: lambda _client, call, _reply: self._scheduler.explain_all(
                call.tenant
            ),
        }

    def _reset_prefix_cache(
        self, client: Client, call: calls.ResetPrefixCache, reply: Reply
    ) -> calls.PrefixCacheReset:
        for observer in self.loop.observers:
            observer.on_cache_reset(self.loop.clock())
        return calls.PrefixCacheReset(num_blocks_evicted=self._scheduler.reset_prefix_cache())

    def _drain(self, client: Client, call: calls.Drain, reply: Reply) -> calls.Draining:
        self._lifecycle.drain("a client asked for it")
        return calls.Draining(num_requests_left=sum(self._scheduler.get_request_counts()))

    def _explain(self, client: Client, call: calls.GetRequestInfo, reply: Reply) -> RequestInfo:
        changes, request_id = self._scheduler.parts.find(PromptChanges), call.request_id
        found = self._scheduler.explain(request_id)
        if found is None:
            request_id = changes.id_of(request_id)
            found = self._scheduler.explain(request_id)
        if found is None:
            raise RequestRefused(
                ErrorCode.UNKNOWN_REQUEST,
                f"request {call.request_id!r:.100} is unknown: it is neither unfinished nor one of "
                "the last that finished; `engine-client info --requests` lists the engine's ids of "
                "those that are unfinished",
            )
        return replace(found, prompt_change=changes.of(request_id))


def _refuse(client: Client, call: calls.AnyCall, reply: Reply) -> None:
    raise RequestRefused(ErrorCode.NOT_SUPPORTED, _NOT_SERVED[type(call)])
