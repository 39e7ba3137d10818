"""What a step is made of: prefill and decode mixed, or one at a time."""

from collections.abc import Callable

from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.report.explanations import Explanations
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.schedule_running import RunningScheduler, Select
from engine_core.scheduler.schedule_waiting import WaitingScheduler
from protocol.explanations import WaitReason


class MixedBatching:
    """Prefill chunks and decodes share a step (Agrawal et al., Sarathi-Serve, OSDI 2024): each
    request catches up with its tokens, running ones first.

    Args:
        make_room: preempts running requests in an empty plan, for more urgent ones.
        delay_factor: `SchedulerConfig.prefill_delay_factor`.
    """

    def __init__(
        self,
        pool: RequestPool,
        running: RunningScheduler,
        waiting: WaitingScheduler,
        explanations: Explanations,
        *,
        make_room: Callable[[PlanBuilder], None],
        delay_factor: float,
    ) -> None:
        self._pool = pool
        self._running = running
        self._waiting = waiting
        self._explanations = explanations
        self._make_room = make_room
        self._delay_factor = delay_factor

    def fill(self, plan: PlanBuilder) -> None:
        """Spend the plan's budget."""
        self._make_room(plan)
        self._running.schedule(plan)
        self._waiting.schedule(plan)
        self._running.schedule_drafts(plan)


class PrefillFirstBatching(MixedBatching):
    """A step is all prefill or all decode, prompts first (Orca, and vLLM's first design):

    1  nothing swapped, the delay has passed: running prompts go on, new ones are admitted
    2  nothing to prefill: more urgent requests may force out running ones
    3  nothing to prefill: running requests decode
    4  nothing preempted: swapped requests come back

    The delay: prompts wait until the first of them has waited for more than `prefill_delay_factor`
    times the duration of the last prefill step, so that more of them share a step. Without running
    requests they never wait."""

    _last_step_s = 0.0
    _was_prefill = False
    _last_prefill_s = 0.0
    """Duration of the last prefill step."""

    def fill(self, plan: PlanBuilder) -> None:
        has_swapped = self._pool.num_swapped > 0
        may_admit = self._has_passed_delay(plan.now)
        self._running.schedule(plan, Select.PREFILLS)
        if not has_swapped and may_admit:
            self._waiting.schedule(plan, whole_prompts=True)
        if not plan.is_empty:
            self._was_prefill = True
            self._explain(has_swapped=has_swapped, may_admit=may_admit)
            return
        self._make_room(plan)
        self._running.schedule(plan, Select.DECODES)
        if has_swapped:
            self._waiting.schedule(plan, only_swapped=True)
        else:
            self._explain(has_swapped=False, may_admit=may_admit)
        self._running.schedule_drafts(plan)

    def _explain(self, *, has_swapped: bool, may_admit: bool) -> None:
        """Why no new request is admitted, where the batching is the reason."""
        if has_swapped:
            why = "swapped requests come back first"
        elif not may_admit:
            why = f"prompts wait for {self._delay_factor} x {self._last_prefill_s:.3f} s"
        else:
            return
        self._explanations.stopped_at(None, WaitReason.DECODES, why)

    def _has_passed_delay(self, now: float) -> bool:
        """Whether prompts may start. Also notes how long the last prefill step took. The earliest
        arrival is taken to be the head's, which is exact under fcfs."""
        if self._was_prefill:
            self._last_prefill_s = now - self._last_step_s
        self._last_step_s, self._was_prefill = now, False
        pool = self._pool
        if not self._delay_factor or not pool.waiting or not pool.running:
            return True
        waited_s = now - pool.waiting.peek_request().arrival_time
        return waited_s > self._delay_factor * self._last_prefill_s
