"""A step is all prefill or all decode; prompts first (Orca and vLLM's first design).

1  nothing swapped, the delay has passed: running prompts go on, new ones are admitted
2  nothing to prefill: more urgent requests may force out running ones
3  nothing to prefill: running requests decode
4  nobody was preempted: swapped requests come back
"""

from engine_core.scheduler.batching.turns import Turns
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.schedule_running import Select
from protocol.explanations import WaitReason


class PrefillFirstBatching:
    """
    Args:
        prefill_delay_factor: prompts wait until the first of them has waited for more than this
            many times
            the duration of the last step of prompts, so that more of them share a step; 0: they do
            not wait. Without running requests they never wait.
    """

    def __init__(self, prefill_delay_factor: float = 0.0) -> None:
        self._delay_factor = prefill_delay_factor
        self._last_step_s = 0.0
        self._was_prefill = False
        self._last_prefill_s = 0.0
        """Duration of the last step of prompts."""

    def fill(self, plan: PlanBuilder, turns: Turns) -> None:
        live = turns.live
        has_swapped = live.num_swapped > 0
        may_admit = self._passed_delay(plan.now, turns)
        turns.running.fill(plan, Select.PREFILLS)
        if not has_swapped and may_admit:
            turns.admit(plan, whole_prompts=True)
        if not plan.is_empty:
            self._was_prefill = True
            self._explain(turns, has_swapped=has_swapped, may_admit=may_admit)
            return
        turns.forced.preempt(plan)
        turns.running.fill(plan, Select.DECODES)
        if has_swapped:
            turns.admit(plan, only_swapped=True)
        else:
            self._explain(turns, has_swapped=False, may_admit=may_admit)

    def _explain(self, turns: Turns, *, has_swapped: bool, may_admit: bool) -> None:
        """Why nobody new is admitted, where that is this batching's doing."""
        if has_swapped:
            why = "swapped requests come back first"
        elif not may_admit:
            why = f"prompts wait for {self._delay_factor} x {self._last_prefill_s:.3f} s"
        else:
            return
        turns.explanations.stopped_at(None, WaitReason.DECODES, why)

    def _passed_delay(self, now: float, turns: Turns) -> bool:
        """Also notes how long the last step of prompts took. The earliest arrival is the head's:
        exactly so first come, first served."""
        if self._was_prefill:
            self._last_prefill_s = now - self._last_step_s
        self._last_step_s, self._was_prefill = now, False
        live = turns.live
        if not self._delay_factor or live.waiting.is_empty or not live.running:
            return True
        waited_s = now - live.waiting.peek_request().arrival_time
        return waited_s > self._delay_factor * self._last_prefill_s
