"""Shows the scheduler at work to clients that watch it (WatchScheduler)."""

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from engine_core.errors import RequestRefused
from engine_core.observers.base import EnginePart, FinishedStep, Handler, Reply
from engine_core.scheduler import SchedulerOutput
from engine_core.server.clients import Client
from protocol.calls import SchedulerSnapshot, WatchScheduler
from protocol.errors import ErrorCode
from protocol.snapshots import MAX_STEPS, SchedulerView

_INTERVAL_S = 0.1
_MOST_SHARE = 0.006
"""The most of the time that it may take; what takes longer is made less often."""
_LEASE_S = 2.0


_Step = tuple[SchedulerOutput, float]


class LiveView(EnginePart):
    """The last of the parts. Steps are noted only while somebody watches, and snapshots are made
    behind a step's outputs. `view`: makes one of plans and the seconds that they took."""

    def __init__(self, view: Callable[[list[_Step]], SchedulerView]) -> None:
        self._view = view
        self._is_watched = False
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)
        self._calls: dict[Client, tuple[Reply, int]] = {}
        self._last_s = self._due_s = -_LEASE_S

    def handlers(self) -> dict[type, Handler]:
        return {WatchScheduler: self._watch}

    def _watch(self, client: Client, call: WatchScheduler, reply: Reply) -> None:
        """Answer behind a step, as soon as another snapshot is due."""
        earlier, _ = self._calls.pop(client, (None, 0))
        if earlier is not None:
            why = "another WatchScheduler of this client took its place; await one at a time"
            earlier(RequestRefused(ErrorCode.INVALID_REQUEST, why))
        self._calls[client] = reply, call.after_step_id
        if not self._is_watched:
            self._steps.clear()
            self._is_watched = True

    def on_departure(self, client: Client) -> None:
        self._calls.pop(client, None)

    def on_step(self, step: FinishedStep) -> None:
        if not self._is_watched:
            return
        if step.plan.total_num_scheduled_tokens or step.plan.preempted_req_ids:
            self._steps.append((step.plan, step.sent_s - step.planned_s))
        if step.sent_s < self._due_s:
            return
        if self._calls:
            self._answer_all(step.sent_s)
        elif step.sent_s >= self._last_s + _LEASE_S:
            self._is_watched = False

    def _answer_all(self, now_s: float) -> None:
        calls, self._calls = self._calls, {}
        first = min(after for _, after in calls.values())
        view = self._view([each for each in self._steps if each[0].step_id > first])
        statistics = self.loop.statistics()
        for reply, after in calls.values():
            steps = [step for step in view.steps if step.step_id > after]
            reply(SchedulerSnapshot(statistics=statistics, view=replace(view, steps=steps)))
        self._last_s = self.loop.clock()
        self._due_s = self._last_s + max(_INTERVAL_S, (self._last_s - now_s) / _MOST_SHARE)
