"""Shows the scheduler at work to clients that watch it (WatchScheduler)."""

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from engine_core.observers.base import FinishedStep, StepObserver
from engine_core.scheduler import Scheduler, SchedulerOutput
from engine_core.server.clients import Client
from protocol.calls import EngineStatistics, SchedulerSnapshot
from protocol.errors import ErrorCode
from protocol.outputs import CallFailed, CallResult
from protocol.requests import Call
from protocol.snapshots import MAX_STEPS

_INTERVAL_S = 0.1
_MOST_SHARE = 0.006
"""The most of the time that it may take; what takes longer is made less often."""
_LEASE_S = 2.0


class LiveView(StepObserver):
    """Among the observers, as the last of them, only while somebody watches: no step costs anything
    before and after. Snapshots are made behind a step's outputs.

    Args:
        answer: sends a client the snapshot, or what it may see of it.
        observers: of the loop.
        clock: seconds; the loop's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: Callable[[], EngineStatistics],
        answer: Callable[[Client, Call, CallResult | CallFailed], None],
        observers: list[StepObserver],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._statistics = statistics
        self._answer = answer
        self._observers = observers
        self._clock = clock
        self._steps: deque[tuple[SchedulerOutput, float]] = deque(maxlen=MAX_STEPS)
        self._calls: dict[Client, tuple[Call, int]] = {}
        self._last_s = self._due_s = -_LEASE_S

    def watch(self, client: Client, call: Call, after_step_id: int) -> None:
        """Answer behind a step, as soon as another snapshot is due."""
        earlier = self._calls.pop(client, None)
        if earlier is not None:
            why = "another WatchScheduler of this client took its place; await one at a time"
            failed = CallFailed(
                call_id=earlier[0].call_id, code=ErrorCode.INVALID_REQUEST, message=why
            )
            self._answer(client, earlier[0], failed)
        self._calls[client] = call, after_step_id
        if self not in self._observers:
            self._steps.clear()
            self._observers.append(self)

    def drop(self, client: Client) -> None:
        """It left."""
        self._calls.pop(client, None)

    def on_step(self, step: FinishedStep) -> None:
        if step.plan.total_num_scheduled_tokens or step.plan.preempted_req_ids:
            self._steps.append((step.plan, step.sent_s - step.planned_s))
        if step.sent_s < self._due_s:
            return
        if self._calls:
            self._answer_all(step.sent_s)
        elif step.sent_s >= self._last_s + _LEASE_S:
            self._observers.remove(self)

    def _answer_all(self, now_s: float) -> None:
        calls, self._calls = self._calls, {}
        first = min(after for _, after in calls.values())
        view = self._scheduler.view([each for each in self._steps if each[0].step_id > first])
        statistics = self._statistics()
        for client, (call, after) in calls.items():
            steps = [step for step in view.steps if step.step_id > after]
            result = SchedulerSnapshot(statistics=statistics, view=replace(view, steps=steps))
            self._answer(client, call, CallResult(call_id=call.call_id, result=result))
        self._last_s = self._clock()
        self._due_s = self._last_s + max(_INTERVAL_S, (self._last_s - now_s) / _MOST_SHARE)
