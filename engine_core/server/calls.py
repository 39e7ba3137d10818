"""Answers to the typed calls of protocol.calls: one arm a call, nothing else can be called."""

from typing import Protocol, assert_never

from protocol.calls import (
    Drain,
    Draining,
    EngineStatistics,
    GetRequestInfo,
    GetStatistics,
    ListRequests,
    Ping,
    Pong,
    PrefixCacheReset,
    RequestList,
    ResetPrefixCache,
)
from protocol.errors import ErrorCode
from protocol.explanations import RequestInfo
from protocol.outputs import CallFailed, CallResult
from protocol.requests import Call


class EngineControls(Protocol):
    """What calls may ask of the engine."""

    @property
    def uptime_s(self) -> float: ...
    def statistics(self) -> EngineStatistics: ...
    def reset_prefix_cache(self) -> int: ...
    def drain(self, why: str) -> int: ...
    def explain(self, request_id: str) -> RequestInfo | None: ...
    def live_request_ids(self) -> list[str]: ...


def answer_call(call: Call, engine: EngineControls) -> CallResult | CallFailed:
    """Carry out one call and return its answer."""
    match call.call:
        case Ping():
            return CallResult(call_id=call.call_id, result=Pong(uptime_s=engine.uptime_s))
        case GetStatistics():
            return CallResult(call_id=call.call_id, result=engine.statistics())
        case ResetPrefixCache():
            forgotten = PrefixCacheReset(num_blocks_evicted=engine.reset_prefix_cache())
            return CallResult(call_id=call.call_id, result=forgotten)
        case Drain():
            left = Draining(num_requests_left=engine.drain("a client asked for it"))
            return CallResult(call_id=call.call_id, result=left)
        case GetRequestInfo(request_id):
            info = engine.explain(request_id)
            if info is None:
                return CallFailed(
                    call_id=call.call_id,
                    code=ErrorCode.UNKNOWN_REQUEST,
                    message=f"request {request_id!r} is unknown: it is neither live nor one of "
                    "the last that finished; give the id that the engine knows it by",
                )
            return CallResult(call_id=call.call_id, result=info)
        case ListRequests():
            live = RequestList(request_ids=engine.live_request_ids())
            return CallResult(call_id=call.call_id, result=live)
        case _:
            assert_never(call.call)
