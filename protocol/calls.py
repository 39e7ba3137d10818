"""The allow-list of calls that a client may make. What is not listed here cannot be called."""

from protocol.base import Message
from protocol.statistics import EngineStatistics


class Ping(Message, frozen=True, tag=1):
    """Answered by Pong at the next step's boundary: a round trip through the engine's loop."""


class GetStatistics(Message, frozen=True, tag=2):
    """Answered by EngineStatistics."""


class ResetPrefixCache(Message, frozen=True, tag=3):
    """Forget every cached block that no request holds. Answered by PrefixCacheReset."""


class Drain(Message, frozen=True, tag=4):
    """Take no more requests, finish what is there, exit with 0. Answered by Draining."""


AnyCall = Ping | GetStatistics | ResetPrefixCache | Drain


class Pong(Message, frozen=True, tag=1):
    uptime_s: float


class PrefixCacheReset(Message, frozen=True, tag=3):
    num_blocks_forgotten: int


class Draining(Message, frozen=True, tag=4):
    num_requests_left: int


AnyResult = Pong | EngineStatistics | PrefixCacheReset | Draining
