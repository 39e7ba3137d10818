"""Several decode steps in one plan, so that what each plan costs the host is paid once for them."""

import numpy as np

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request_pool import RequestPool


class DecodeSteps(SchedulerPart):
    """A plan in which every sequence computes its last token may go on with the tokens that these
    sample, in slots that were reserved (`num_lookahead_slots`):

        slots    | ... t6 | t7 | .. | .. |    t7 is known and computed; t8 and t9 are sampled on the
        computes            t7   t8   t9      way, t10 at the end: the runner returns t8 t9 t10

    A sequence does no more steps than its length allows. What is sampled behind a stop token is
    dropped (`append_until_stop`)."""

    def __init__(self, pool: RequestPool, config: SchedulerConfig) -> None:
        self._pool = pool
        self._most = config.num_decode_steps

    def on_filled(self, plan: PlanBuilder) -> None:
        """Give a complete plan several decode steps. It keeps its one step while requests wait,
        after a preemption, with a prompt, a first token or a draft in it, and with any sequence
        whose next token is not its own alone to choose: a beam, one that others fork from, one
        whose client looks for stop strings, or that reports log-probabilities."""
        if self._pool.waiting or plan.has_preempted or plan.has_drafts:
            return
        batch = self._pool.batch
        rows, counts = plan.scheduled_rows
        num_tokens, computed = batch.num_tokens[rows], batch.num_computed_tokens[rows]
        is_decode = (counts == 1) & (computed + 1 == num_tokens)
        is_decode &= num_tokens > batch.num_prompt_tokens[rows]
        is_decode &= batch.may_run_ahead[rows] & batch.may_schedule_async[rows]
        if not len(rows) or np.count_nonzero(is_decode) < len(rows):
            return
        num_slots = batch.num_allocated_slots[rows] - computed
        num_steps = np.minimum(batch.max_len[rows] - num_tokens, num_slots)
        num_steps = np.minimum(num_steps, self._most).astype(np.int32)
        if num_steps.max() > 1:
            plan.decode_several(num_steps)
