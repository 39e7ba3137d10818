"""Answers to the typed calls of protocol.calls: one arm a call, nothing else can be called."""

from typing import Protocol, assert_never

from protocol.calls import (
    Drain,
    Draining,
    GetStatistics,
    Ping,
    Pong,
    PrefixCacheReset,
    ResetPrefixCache,
)
from protocol.outputs import CallResult
from protocol.requests import Call
from protocol.statistics import EngineStatistics


class Callable(Protocol):
    """What calls may ask of the engine."""

    @property
    def uptime_s(self) -> float: ...
    def statistics(self) -> EngineStatistics: ...
    def reset_prefix_cache(self) -> int: ...
    def drain(self, why: str) -> int: ...


def answer_call(call: Call, engine: Callable) -> CallResult:
    """Carry out one call and return its answer."""
    match call.call:
        case Ping():
            return CallResult(call_id=call.call_id, result=Pong(uptime_s=engine.uptime_s))
        case GetStatistics():
            return CallResult(call_id=call.call_id, result=engine.statistics())
        case ResetPrefixCache():
            forgotten = PrefixCacheReset(num_blocks_forgotten=engine.reset_prefix_cache())
            return CallResult(call_id=call.call_id, result=forgotten)
        case Drain():
            left = Draining(num_requests_left=engine.drain("a client asked for it"))
            return CallResult(call_id=call.call_id, result=left)
        case _:
            assert_never(call.call)
