"""The calls that a client may make, and their results. There are no others."""

from protocol.base import Message
from protocol.explanations import RequestInfo
from protocol.statistics import EngineStatistics


class Ping(Message, frozen=True, tag=1):
    """Answered by Pong between two steps: a round trip through the engine's loop."""


class GetStatistics(Message, frozen=True, tag=2):
    """Answered by EngineStatistics."""


class ResetPrefixCache(Message, frozen=True, tag=3):
    """Evict every cached block that no request uses. Answered by PrefixCacheReset."""


class Drain(Message, frozen=True, tag=4):
    """Accept no more requests, finish those there are, exit with 0. Answered by Draining."""


class GetRequestInfo(Message, frozen=True, tag=5):
    """Answered by RequestInfo, or by CallFailed with code UNKNOWN_REQUEST. Live requests and the
    last ones that finished are known, of all clients."""

    request_id: str


class ListRequests(Message, frozen=True, tag=6):
    """Answered by RequestList."""


AnyCall = Ping | GetStatistics | ResetPrefixCache | Drain | GetRequestInfo | ListRequests


class Pong(Message, frozen=True, tag=1):
    uptime_s: float


class PrefixCacheReset(Message, frozen=True, tag=3):
    num_blocks_evicted: int


class Draining(Message, frozen=True, tag=4):
    num_requests_left: int


class RequestList(Message, frozen=True, tag=6):
    request_ids: list[str]
    """Of all live requests of all clients, each client's in order of arrival."""


AnyResult = Pong | EngineStatistics | PrefixCacheReset | Draining | RequestInfo | RequestList
