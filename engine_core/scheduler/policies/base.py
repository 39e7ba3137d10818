"""Which request is next and which is preempted: what each policy fills in."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.config import PolicyName
from engine_core.scheduler.request import Request


class WaitingQueue(Protocol):
    """Requests that are not admitted, or that were preempted. A swapped request comes before every
    one that is not; among swapped ones, and among the others, the policy's order holds. No
    operation searches the queue: each is O(1) or O(log n)."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]:
        """All requests, the next to be popped first. May cost O(n log n); not for the hot path."""

    def add_request(self, request: Request) -> None:
        """A new request."""

    def prepend_request(self, request: Request) -> None:
        """A preempted request comes back: to the head under fcfs (also in front of others that were
        preempted earlier in the same step); elsewhere to the place that its key gives."""

    def peek_request(self) -> Request:
        """The next one, which stays. The queue is not empty."""

    def pop_request(self) -> Request:
        """Remove the one that `peek_request` shows. The queue is not empty."""

    def remove_request(self, request: Request) -> None: ...


class SchedulingPolicy:
    """Orders the waiting queue and selects victims; the scheduler moves them. It reads no blocks,
    budgets or steps. One scheduler's; it may keep state."""

    name: PolicyName
    waiting: WaitingQueue
    counts_service = False
    """Whether `on_decode` is called."""

    def new_step(self) -> None:
        """A step is about to be planned."""

    def check(self, request: Request) -> None:
        """Raises ValueError: the request has a priority, which this policy does not look at."""
        if request.message.priority != 0:
            raise ValueError(
                f"priority is {request.message.priority}, but policy {self.name} takes only 0; "
                "omit it or start the engine with --scheduling-policy priority"
            )

    def select_victim(self, running: dict[str, Request], requester: Request) -> Request:
        """Which of the running requests (in order of admission, by request id; never empty) loses
        its blocks so that `requester`, one of them, gets one. It may be `requester` itself."""
        raise NotImplementedError

    def select_forced_victims(self, running: dict[str, Request]) -> list[Request]:
        """Running requests that may be preempted to give the head of the waiting queue a place, the
        least urgent first. Called once a step, before anything is scheduled."""
        return []

    def on_arrival(self, request: Request) -> int:
        """Returns the number of the request's tenant for `on_decode`."""
        return 0

    def on_finish(self, request: Request) -> None:
        """A request is over, or will never run."""

    def on_admit(self, request: Request, num_uncached_tokens: int) -> None:
        """A request starts to run; that many of its prompt tokens are not in the cache."""

    def on_running(self, request: Request) -> None:
        """A request leaves the waiting queue to run, for the first time or again."""

    def on_decode(self, num_tokens_by_tenant: npt.NDArray[np.int64]) -> None:
        """One step's output tokens; entry i is tenant number i's. Not called without tokens."""

    @property
    def has_one_tenant(self) -> bool:
        """Whether all output of the last step is of one: then `on_decode_alone` is called."""
        return False

    def on_decode_alone(self, num_tokens: int) -> None:
        """One step's output tokens."""

    def service_by_tenant(self) -> dict[str, float]:
        """Weighted tokens served, of tenants with unfinished requests; empty if not counted."""
        return {}
