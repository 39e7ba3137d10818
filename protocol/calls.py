"""The allow-list of calls that a client may make. What is not listed here cannot be called."""

from protocol.base import Message
from protocol.explanations import RequestInfo
from protocol.statistics import EngineStatistics


class Ping(Message, frozen=True, tag=1):
    """Answered by Pong at the next step's boundary: a round trip through the engine's loop."""


class GetStatistics(Message, frozen=True, tag=2):
    """Answered by EngineStatistics."""


class ResetPrefixCache(Message, frozen=True, tag=3):
    """Forget every cached block that no request holds. Answered by PrefixCacheReset."""


class Drain(Message, frozen=True, tag=4):
    """Take no more requests, finish what is there, exit with 0. Answered by Draining."""


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
    num_blocks_forgotten: int


class Draining(Message, frozen=True, tag=4):
    num_requests_left: int


class RequestList(Message, frozen=True, tag=6):
    request_ids: list[str]
    """Of all live requests of all clients, each client's in order."""


AnyResult = Pong | EngineStatistics | PrefixCacheReset | Draining | RequestInfo | RequestList
