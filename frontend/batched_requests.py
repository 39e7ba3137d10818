"""Requests of one call, which may be more than an engine takes at once."""

from collections.abc import Awaitable, Callable, Sequence

from frontend.engine.session import EngineSession
from frontend.event_loop import Pause
from frontend.fleet.engine_group import EngineGroup
from frontend.outputs import RequestOutput
from frontend.request_state import RequestState

_MOST_IN_FLIGHT = 32_768
"""Fewer than the engine lets wait by default."""


async def run_all(
    session: EngineSession | EngineGroup,
    requests: Sequence[RequestState],
    answer: Callable[[RequestState], Awaitable[RequestOutput]],
) -> list[RequestOutput]:
    """What `answer` gives of each, in their order. An error of one aborts all."""
    outputs, pause = [], Pause()
    try:
        for index, request in enumerate(requests):
            # the first ones, then another one for each that has ended
            first = index + _MOST_IN_FLIGHT - 1 if index else 0
            for each in requests[first : index + _MOST_IN_FLIGHT]:
                session.submit(each)
                await pause.between()
            outputs.append(await answer(request))
        return outputs
    finally:
        for request in requests:
            session.release(request)
