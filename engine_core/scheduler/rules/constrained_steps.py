"""What follows a grammar, in each step: requests whose grammars are there, masks of tokens, and
tokens that are forced."""

import numpy as np

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.constraints import ConstrainedSequence, Constraints
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.request import RequestStatus
from engine_core.scheduler.request_pool import RequestPool


class ConstrainedSteps(SchedulerPart):
    def __init__(
        self, pool: RequestPool, constraints: Constraints, config: SchedulerConfig
    ) -> None:
        self._pool = pool
        self._constraints = constraints
        self._config = config

    def begin_step(self, step_id: int, now: float) -> None:
        """Requests whose grammars are there enter the queue; those that cannot have them end."""
        for request, why_not in self._constraints.take_compiled():
            if self._pool.compiling.get(request.request_id) is not request:
                continue  # it ended meanwhile
            if why_not is None:
                self._pool.enter_queue(request)
            else:
                self._pool.finish_request(request, RequestStatus.FINISHED_REFUSED, why_not)

    def on_plan(self, plan: SchedulerOutput) -> None:
        """Give the plan masks for what of it follows a grammar and is to get a token."""
        batch, rows = self._pool.batch, plan.batch.rows
        is_constrained = batch.is_constrained[rows]
        if not np.count_nonzero(is_constrained):
            return
        is_constrained &= batch.num_computed_tokens[rows] >= batch.num_tokens[rows]
        places = np.flatnonzero(is_constrained)
        rows = rows[places]
        num_output = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
        drafts = plan.scheduled_spec_decode_tokens
        sequences = map(self._pool.sequence_in, rows.tolist())
        constrained = [
            ConstrainedSequence(place, sequence, number, drafts.get(sequence.sequence_id, ()))
            for place, sequence, number in zip(
                places.tolist(), sequences, num_output.tolist(), strict=True
            )
        ]
        if constrained:
            plan.token_masks = self._constraints.begin_masks(constrained)

    def on_update(self, step: InFlightStep, duration_s: float) -> None:
        """Tokens that a grammar forces need no step each: they are drafts that are always right."""
        batch, rows = self._pool.batch, step.batch.rows
        if not self._config.max_num_drafts:
            return
        may_draft = batch.is_constrained[rows]
        if not np.count_nonzero(may_draft):
            return
        may_draft &= step.batch.unchanged()
        may_draft &= batch.num_tokens[rows] - batch.num_computed_tokens[rows] == 1
        may_draft &= ~batch.is_blocked[rows]
        rows = rows[may_draft]
        num_tokens = batch.num_tokens[rows]
        known = zip(
            map(self._pool.sequence_in, rows.tolist()),
            (num_tokens - batch.num_prompt_tokens[rows]).tolist(),
            batch.token_ids[rows, num_tokens - 1].tolist(),
            strict=True,
        )
        for sequence, forced in self._constraints.forced_tokens(known):
            most = sequence.max_drafts(self._config.max_model_len)
            sequence.spec_token_ids = forced[: max(0, most)]
            sequence.has_forced_drafts = True
