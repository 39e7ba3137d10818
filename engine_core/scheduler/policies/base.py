"""Who is next and who gives way: the interface that each policy fills in.

A policy orders the waiting queue and names victims. It moves nobody, and knows no blocks, budgets
or steps; the scheduler calls it, one question at a time.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.request import Request


class WaitingQueue(Protocol):
    """Requests that are not admitted, or that were preempted. A swapped request (status SWAPPED)
    outranks every request that is not; among swapped ones, and among the others, the policy's order
    holds. No operation searches the queue: each is O(1) or O(log n)."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be popped. May cost O(n log n); not for the hot path."""
        ...

    @property
    def is_empty(self) -> bool: ...
    def add_request(self, request: Request) -> None:
        """A new request."""
        ...

    def prepend_request(self, request: Request) -> None:
        """A preempted request comes back: to the head under first come, first served (also in front
        of others preempted earlier in the same step); elsewhere to the place that its key gives."""
        ...

    def peek_request(self) -> Request:
        """The next one, which stays. The queue is not empty."""
        ...

    def pop_request(self) -> Request:
        """Take the one that `peek_request` shows. The queue is not empty."""
        ...

    def remove_request(self, request: Request) -> None:
        """Take this very request."""
        ...


class SchedulingPolicy(Protocol):
    """One scheduler's policy; it may keep state (service counters, the time)."""

    @property
    def counts_service(self) -> bool:
        """Whether `decoded` wants to be told."""
        ...

    @property
    def waiting(self) -> WaitingQueue:
        """The one queue of this policy."""
        ...

    def new_step(self, now: float) -> None:
        """A step is about to be planned; `now` in seconds, on the clock of `arrival_time`."""
        ...

    def check(self, request: Request) -> None:
        """
        Raises:
            ValueError: the request asks for what this policy does not do (a priority under fcfs).
        """
        ...

    def victim(self, running: Mapping[str, Request], requester: Request) -> Request:
        """Which of the running requests (in order of admission, by request id; never empty) loses
        its blocks so that `requester`, one of them, gets one. It may be `requester` itself."""
        ...

    def forced_victims(self, running: Mapping[str, Request]) -> list[Request]:
        """Running requests that give way to the head of the waiting queue though memory is free,
        the worst first: all that it outranks by enough. Called once a step, before anything is
        scheduled. The victims go behind the head."""
        ...

    def joined(self, request: Request) -> int:
        """A request arrived. Returns the number of its tenant for `decoded`."""
        ...

    def left(self, request: Request) -> None:
        """A request is over, or will never run."""
        ...

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """A request starts to run; that many of its prompt tokens are not in the cache."""
        ...

    def decoded(self, num_tokens_by_tenant: npt.NDArray[np.int64]) -> None:
        """One step's output tokens; entry i is tenant number i's. Not called with nothing in it."""
        ...

    def service_by_tenant(self) -> dict[str, float]:
        """Weighted tokens served, of tenants with live requests; empty where nothing is counted."""
        ...
