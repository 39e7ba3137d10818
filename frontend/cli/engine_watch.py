"""What `engine-client top` knows of an engine, over calls that any client may make."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque

from frontend.async_llm import AsyncLLM
from frontend.errors import CallRefused, EngineClientError
from protocol.calls import EngineStatistics
from protocol.explanations import RequestInfo

_WINDOW_S = 10.0
_SILENT_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Of the last seconds. None: there was nothing to divide by."""

    steps_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_step: float | None
    decode_tokens_per_step: float | None
    step_s: float | None
    hit_rate: float | None
    """Share of prompt tokens found in the prefix cache."""
    queue_s: float | None
    """Mean of the requests that got their first token."""
    ttft_s: float | None


def rates_between(before: EngineStatistics, now: EngineStatistics) -> Rates:
    """What happened between two moments of one engine."""

    def grown(name: str) -> float:
        return float(getattr(now, name) - getattr(before, name))

    def mean(name: str, count: str) -> float | None:
        return grown(name) / grown(count) if grown(count) else None

    seconds = grown("uptime_s") or 1.0
    return Rates(
        steps_per_s=grown("num_steps") / seconds,
        prefill_tokens_per_s=grown("num_prefill_tokens") / seconds,
        decode_tokens_per_s=grown("num_decode_tokens") / seconds,
        prefill_tokens_per_step=mean("num_prefill_tokens", "num_steps"),
        decode_tokens_per_step=mean("num_decode_tokens", "num_steps"),
        step_s=mean("step_time_s", "num_steps"),
        hit_rate=mean("num_cached_prompt_tokens", "num_prompt_tokens"),
        queue_s=mean("queue_time_s", "num_first_tokens"),
        ttft_s=mean("ttft_s", "num_first_tokens"),
    )


class EngineWatch:
    """What is known of an engine now. One call at a time is under way: an engine that does not
    answer is not asked again."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.trouble: str | None = None
        """Why the numbers are old; None if they are not."""
        self.requests: list[RequestInfo] = []
        self.num_unfinished = 0
        self.refusal: str | None = None
        """Why requests are not shown."""
        self.token_rates: dict[str, float] = {}
        """Output tokens a second by request."""
        self._history: deque[EngineStatistics] = deque()
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0

    @property
    def now(self) -> EngineStatistics | None:
        return self._history[-1] if self._history else None

    @property
    def rates(self) -> Rates:
        return rates_between(self._history[0], self._history[-1])

    async def refresh(self) -> None:
        """Ask the engine, and return when it has answered, or has kept silent for a while."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asked_s = time.monotonic()
        await asyncio.wait([self._asking], timeout=_SILENT_S)
        if not self._asking.done():
            is_connected = self.llm.engines[0].session.is_connected
            what = "no answer" if is_connected else "the engine is gone, waiting for it"
            self.trouble = f"{what} for {time.monotonic() - self._asked_s:.0f} s"
            return
        asking, self._asking = self._asking, None
        try:
            asking.result()
            self.trouble = None
        except EngineClientError as error:
            self.trouble = str(error)

    async def explain(self, request_id: str) -> RequestInfo | None:
        """From the last answer; of one that is no more among the unfinished, from the engine."""
        for info in self.requests:
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
        if self._history and now.uptime_s < self._history[-1].uptime_s:
            self._history.clear()  # it was started again
        elapsed_s = now.uptime_s - self._history[-1].uptime_s if self._history else 0.0
        self._history.append(now)
        while now.uptime_s - self._history[0].uptime_s > _WINDOW_S and len(self._history) > 2:
            self._history.popleft()
        before = {each.request_id: each.num_output_tokens for each in self.requests}
        self.requests, self.num_unfinished, self.token_rates = [], 0, {}
        if not now.num_running + now.num_waiting:
            return
        try:
            answer = await self.llm.request_infos()
        except CallRefused as error:
            self.refusal = str(error)
            return
        self.requests, self.num_unfinished = answer.requests, answer.num_unfinished
        if elapsed_s:
            self.token_rates = {
                each.request_id: (each.num_output_tokens - before[each.request_id]) / elapsed_s
                for each in self.requests
                if each.request_id in before
            }
