"""A trace: requests in order of arrival, as lengths and contents. Knows no engine and no file.

Contents are runs of one repeated token id. Two prompts that begin with the same runs begin with
the same tokens, and runs that are not the same never share a token id; block hashes chain over all
tokens before, so that is all that a prefix cache can tell apart. Token ids:

    [0, 2**30)      of one request alone: its own text 2 * index, its answer 2 * index + 1
    [2**30, 2**31)  shared: a system prefix, or a hash id of a trace file
"""

import dataclasses
from array import array
from collections.abc import Iterator
from typing import Protocol

from scripts.simulator.errors import SimulationError

Segment = tuple[int, int]
"""(token id, how many times)."""

_FIRST_SHARED_ID = 2**30
MAX_REQUESTS = _FIRST_SHARED_ID // 2


def shared_segment(identity: int, num_tokens: int) -> Segment:
    """Text that requests share, by the number that names it."""
    return _FIRST_SHARED_ID + identity % (_FIRST_SHARED_ID - 1), num_tokens


def is_shared(segment: Segment) -> bool:
    """Whether others may have this text too."""
    return segment[0] >= _FIRST_SHARED_ID


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a chat that is still to come."""

    think_s: float
    """From the end of the last answer to the arrival of this turn."""
    num_text_tokens: int
    num_output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Its prompt is `context` (what it shares with others, or its former turns) and
    `num_text_tokens` of its own."""

    index: int
    """Unique in the trace."""
    arrival_s: float
    num_text_tokens: int
    num_output_tokens: int
    context: tuple[Segment, ...] = ()
    session: int | None = None
    """Requests of one chat have one session."""
    later_turns: tuple[Turn, ...] = ()
    tenant: str | None = None
    priority: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        if not self.num_text_tokens:
            return self.context
        return (*self.context, (2 * self.index, self.num_text_tokens))

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_text_tokens + sum(length for _, length in self.context)

    @property
    def output_token_id(self) -> int:
        """Every token of its answer."""
        return 2 * self.index + 1

    def prompt(self) -> "array[int]":
        """Token ids of 4 bytes each."""
        token_ids = array("I")
        for token_id, length in self.segments:
            token_ids += array("I", (token_id,)) * length
        return token_ids

    def prompt_token_ids(self) -> list[int]:
        return self.prompt().tolist()

    def next_turn(self, finished_s: float) -> "TraceRequest | None":
        """The chat's next request, whose prompt is all that was said; None after the last turn."""
        if not self.later_turns:
            return None
        turn, *later = self.later_turns
        return TraceRequest(
            index=self.index + 1,
            arrival_s=finished_s + turn.think_s,
            num_text_tokens=turn.num_text_tokens,
            num_output_tokens=turn.num_output_tokens,
            context=(*self.segments, (self.output_token_id, self.num_output_tokens)),
            session=self.session,
            later_turns=tuple(later),
            tenant=self.tenant,
            priority=self.priority,
        )


class Trace(Protocol):
    """Requests in order of arrival, made while they are asked for, the same each time."""

    @property
    def name(self) -> str: ...
    @property
    def num_skipped(self) -> int:
        """Rows of the source that are no requests; complete when all requests were read."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]: ...


class ShapedTrace:
    """A part of a trace, at another rate.

    Args:
        rate_scale: requests come so many times as fast; think times stay.
        skip_s: leave out what arrives before this time of the trace's own clock; the rest is
            shifted to begin at 0.
        duration_s: of the trace's own clock, from `skip_s` on; None for all.
        max_requests: end after so many; the later turns of a chat do not count.
        delay_s: shift every arrival by so much, after scaling.

    Raises:
        SimulationError: a value outside its limits.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        rate_scale: float = 1.0,
        skip_s: float = 0.0,
        duration_s: float | None = None,
        max_requests: int | None = None,
        delay_s: float = 0.0,
    ) -> None:
        for name, value in (("rate_scale", rate_scale), ("duration_s", duration_s)):
            if value is not None and not value > 0:
                raise SimulationError(f"{name} is {value}, it must be above 0")
        for name, value in (("skip_s", skip_s), ("delay_s", delay_s)):
            if not value >= 0:
                raise SimulationError(f"{name} is {value}, it must be at least 0")
        if max_requests is not None and max_requests < 1:
            raise SimulationError(f"num_requests is {max_requests}, it must be at least 1")
        self._trace = trace
        self._rate_scale = rate_scale
        self._skip_s = skip_s
        self._stop_s = float("inf") if duration_s is None else skip_s + duration_s
        self._max_requests = max_requests
        self._delay_s = delay_s

    @property
    def name(self) -> str:
        return self._trace.name

    @property
    def num_skipped(self) -> int:
        return self._trace.num_skipped

    def __iter__(self) -> Iterator[TraceRequest]:
        num_requests = 0
        for request in self._trace:
            if request.arrival_s < self._skip_s:
                continue
            if request.arrival_s >= self._stop_s or num_requests == self._max_requests:
                return
            num_requests += 1
            arrival_s = (request.arrival_s - self._skip_s) / self._rate_scale + self._delay_s
            if arrival_s != request.arrival_s:
                request = dataclasses.replace(request, arrival_s=arrival_s)
            yield request
