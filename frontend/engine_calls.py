"""The calls that a client may make on its engine. Must not know how they travel."""

from abc import ABC, abstractmethod

from protocol.calls import (
    AnyCall,
    AnyResult,
    Drain,
    Draining,
    GetRequestInfo,
    GetStatistics,
    ListRequests,
    Ping,
    Pong,
    PrefixCacheReset,
    RequestList,
    ResetPrefixCache,
)
from protocol.explanations import RequestInfo
from protocol.statistics import EngineStatistics


class EngineCalls(ABC):
    """All of them raise CallRefused if the engine does not want to, EngineDied if it was lost
    before it answered, and EngineUnavailable if it is not there."""

    @abstractmethod
    async def call(self, call: AnyCall) -> AnyResult:
        """Send a call and wait for its answer."""

    async def statistics(self) -> EngineStatistics:
        """The engine's numbers, over all its clients."""
        result = await self.call(GetStatistics())
        assert isinstance(result, EngineStatistics)
        return result

    async def request_info(self, request_id: str) -> RequestInfo:
        """Where a request is and why, by the id that the engine knows it by: a live one or one of
        the last that finished, of any client. CallRefused if there is none."""
        result = await self.call(GetRequestInfo(request_id=request_id))
        assert isinstance(result, RequestInfo)
        return result

    async def request_ids(self) -> list[str]:
        """What the engine knows its live requests by, those of all clients."""
        result = await self.call(ListRequests())
        assert isinstance(result, RequestList)
        return result.request_ids

    async def reset_prefix_cache(self) -> int:
        """Make the engine forget cached prompts that nobody uses. Returns how many blocks."""
        result = await self.call(ResetPrefixCache())
        assert isinstance(result, PrefixCacheReset)
        return result.num_blocks_forgotten

    async def ping(self) -> float:
        """A round trip through the engine's loop. Returns its uptime in seconds."""
        result = await self.call(Ping())
        assert isinstance(result, Pong)
        return result.uptime_s

    async def drain(self) -> int:
        """Make the engine finish what it has and exit. Returns how many requests are left."""
        result = await self.call(Drain())
        assert isinstance(result, Draining)
        return result.num_requests_left
