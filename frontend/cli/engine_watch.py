"""What `engine-client top` knows of an engine, over calls that any client may make."""

import asyncio
import time
from collections import deque

from frontend.async_llm import AsyncLLM
from frontend.errors import EngineClientError
from protocol.calls import EngineStatistics, RequestInfos
from protocol.explanations import RequestInfo

_WINDOW_S = 10.0
_SILENT_S = 2.0


class EngineWatch:
    """One call at a time is under way: an engine that does not answer is not asked again."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.trouble: str | None = None
        """Why the numbers are old, or requests are not shown."""
        self.history: deque[EngineStatistics] = deque()
        """Statistics of the last seconds."""
        self.unfinished = RequestInfos(requests=[], num_unfinished=0)
        self.token_rates: dict[str, float] = {}
        """Output tokens a second by request."""
        self._asking: asyncio.Task[None] | None = None
        self._answered_s = time.monotonic()

    def mean(self, counter: str, per: str) -> float | None:
        """How much one counter has grown in the last seconds, divided by another's growth; None if
        that is 0."""

        def grown(name: str) -> float:
            return float(getattr(self.history[-1], name) - getattr(self.history[0], name))

        return grown(counter) / grown(per) if grown(per) else None

    async def refresh(self) -> None:
        """Ask the engine, and return when it has answered, or has kept silent for a while."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        asking = self._asking  # another refresh may end it
        await asyncio.wait([asking], timeout=_SILENT_S)
        if not asking.done():
            is_connected = self.llm.engines[0].session.is_connected
            what = "no answer" if is_connected else "the engine is gone, waiting for it"
            self.trouble = f"{what} for {time.monotonic() - self._answered_s:.0f} s"
            return
        error, self._asking = asking.exception(), None if self._asking is asking else self._asking
        if error is not None and not isinstance(error, EngineClientError):
            raise error
        self.trouble = None if error is None else str(error)

    async def explain(self, request_id: str) -> RequestInfo | None:
        """From the last answer; of one that is no more among the unfinished, from the engine."""
        for info in self.unfinished.requests:
            if info.request_id == request_id:
                return info
        try:
            return await asyncio.wait_for(self.llm.request_info(request_id), _SILENT_S)
        except (EngineClientError, TimeoutError):
            return None

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _ask(self) -> None:
        await self.llm.ready()
        now = await self.llm.statistics()
        self._answered_s = time.monotonic()
        history = self.history
        if history and now.uptime_s < history[-1].uptime_s:
            history.clear()  # it was started again
        elapsed_s = now.uptime_s - history[-1].uptime_s if history else 0.0
        history.append(now)
        while now.uptime_s - history[0].uptime_s > _WINDOW_S and len(history) > 2:
            history.popleft()
        before = {each.request_id: each.num_output_tokens for each in self.unfinished.requests}
        self.unfinished = RequestInfos(requests=[], num_unfinished=0)
        if now.num_running + now.num_waiting:
            self.unfinished = await self.llm.request_infos()
        self.token_rates = {
            each.request_id: (each.num_output_tokens - before[each.request_id]) / elapsed_s
            for each in self.unfinished.requests
            if elapsed_s and each.request_id in before
        }
