"""Drafts for the next step, and what became of those of the last."""

import numpy as np

from engine_core.scheduler.batch_state import BoolArray, Int64Array
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request, Sequence
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.speculation.base import Proposer
from engine_core.scheduler.speculation.draft_lengths import DraftLengths
from engine_core.scheduler.token_budget.base import Float64Array, StepLoad

_SLO_MARGIN = 0.05
_PLAIN_STEPS = 4
"""Steps without drafts at each number of sequences, to know what drafts cost: where the runner
makes them, and where an SLO is to be kept."""
_FOUND_DECAY = 0.8
_SELDOM, _TRY_AFTER = 0.17, 4
"""Share of attempts that find drafts; below it a sequence is tried again after so many tokens: a
look-up takes time too."""
_ASYNC_SELDOM, _ASYNC_TRY_AFTER = 0.5, 16
"""`_SELDOM` and `_TRY_AFTER` where an attempt costs a step in flight."""
_EMPTY_ASKS, _MOST_PASSED_OVER = 8, 4
"""For every so many steps on end that got no drafts, one more is passed over behind each."""


class Speculator(SchedulerPart):
    """Asks the proposer for drafts of running decodes, as many as `DraftLengths` says.

    With steps in flight a sequence that is to get drafts is held back: it is not scheduled before
    its last token is known. The others are.

    `proposer`: None: the runner makes the drafts (`on_filled`)."""

    def __init__(
        self, pool: RequestPool, config: SchedulerConfig, proposer: Proposer | None
    ) -> None:
        self._pool = pool
        self._batch = batch = pool.batch
        self._proposer = proposer
        self._max_model_len = config.max_model_len
        tpot_ms = config.slo_tpot_ms
        self._lengths = DraftLengths(
            batch,
            most=config.num_speculative_tokens,
            slo_tpot_s=None if tpot_ms is None else (1 - _SLO_MARGIN) * tpot_ms / 1000,
            num_plain_steps=_PLAIN_STEPS if proposer is None or tpot_ms is not None else 0,
        )
        self._is_async = config.max_steps_in_flight > 1
        self._generation: Int64Array = np.full(batch.max_num_rows, -1, np.int64)
        """The generation of each row when its columns about attempts began."""
        self._is_held: BoolArray = np.zeros(batch.max_num_rows, np.bool_)
        self._found: Float64Array = np.ones(batch.max_num_rows)
        """The share of a sequence's attempts that found drafts, the latest weigh most."""
        self._try_at: Int64Array = np.zeros(batch.max_num_rows, np.int64)
        """Length of the sequence from which on the next attempt is made."""
        self._num_empty = self._num_to_pass_over = 0
        self._seldom = _ASYNC_SELDOM if self._is_async else _SELDOM
        self._try_after = _ASYNC_TRY_AFTER if self._is_async else _TRY_AFTER

    # ------------------------------------------------------------------ what a step tells

    def on_drafts(self, row: int, num_drafts: int, num_accepted: int) -> None:
        self._lengths.observe_drafts(row, num_drafts, num_accepted)

    def on_update(self, step: InFlightStep, duration_s: float) -> None:
        self._observe_time(step, duration_s)
        self._propose()

    def _observe_time(self, step: InFlightStep, duration_s: float) -> None:
        """Time an ended step, if it computed nothing but last tokens and drafts. Drafts that the
        runner makes take time in the step that makes them and in the one that verifies them."""
        plan, num_drafts = step.plan, 0
        if plan.scheduled_spec_decode_tokens:
            num_drafts = sum(map(len, plan.scheduled_spec_decode_tokens.values()))
        num_sequences = len(plan.batch.req_ids)
        if not num_sequences or plan.total_num_scheduled_tokens != num_sequences + num_drafts:
            return
        if plan.num_drafts_wanted is not None:
            num_drafts = (num_drafts + int(plan.num_drafts_wanted.sum()) + 1) // 2
        if self._lengths.counts_step(num_sequences, num_drafts):
            num_context = int(plan.batch.num_computed_tokens.sum()) + num_sequences
            num_tokens = num_sequences + num_drafts
            load = StepLoad(num_tokens, num_sequences, num_context, num_context)
            self._lengths.observe_step(load, duration_s)

    # ------------------------------------------------------------------ what the next one gets

    def _propose(self) -> None:
        """Drafts for all running sequences whose last token alone is to be computed next. Where
        steps get none, only some are asked for: to ask takes time while no step is in flight."""
        if self._proposer is None:
            return
        if self._num_to_pass_over and not self._is_async:
            self._num_to_pass_over -= 1
            return
        rows = self._decodes(self._batch.order)
        if not len(rows) or self._ask(self._proposer, rows):
            self._num_empty = 0
        else:
            self._num_empty += 1
        self._num_to_pass_over = min(self._num_empty // _EMPTY_ASKS, _MOST_PASSED_OVER)

    def _ask(self, proposer: Proposer, rows: Int64Array) -> bool:
        """Ask for drafts of these rows. Returns whether any of them gets some."""
        batch = self._batch
        num_tokens = batch.num_tokens[rows]
        most = np.minimum(self._choose(rows), batch.max_len[rows] - num_tokens - 1)
        self._begin_new(rows)
        tries = (num_tokens >= self._try_at[rows]) & (most > 0)
        if self._is_async:
            tries = self._hold_back(rows, tries)
        proposed: dict[int, Sequence] = {}
        for index in np.flatnonzero(tries).tolist():
            row, length = int(rows[index]), int(num_tokens[index])
            sequence = self._pool.sequence_in(row)
            if sequence.request.beam_search is not None:
                continue
            tokens = batch.token_ids[row, sequence.request.content.embeds_stop : length]
            drafts = proposer.propose(tokens, sequence.request.scope, int(most[index]))
            if drafts:
                sequence.spec_token_ids = drafts[: most[index]]
                proposed[row] = sequence
            found = _FOUND_DECAY * self._found[row] + (1 - _FOUND_DECAY) * bool(drafts)
            self._found[row] = found
            self._try_at[row] = length + (1 if found >= self._seldom else self._try_after)
        if not proposed:
            return False
        counts = np.array([len(each.spec_token_ids) for each in proposed.values()])
        is_worth = self._lengths.are_worth_a_step(np.array([*proposed]), counts, len(batch.order))
        if not is_worth:
            for sequence in proposed.values():
                sequence.spec_token_ids = []
        return is_worth

    def on_filled(self, plan: PlanBuilder) -> None:
        """Drafts that the runner is to make for each sequence of a plan behind what it samples,
        unless a proposer makes them."""
        rows, _ = plan.scheduled_rows
        if self._proposer is not None or not len(rows):
            return
        lengths = np.zeros(len(rows), np.int64)
        is_decode = np.isin(rows, self._decodes(rows))
        if is_decode.any():
            lengths[is_decode] = self._choose(rows[is_decode])
        for place in np.flatnonzero(lengths).tolist():
            if self._pool.sequence_in(int(rows[place])).request.beam_search is not None:
                lengths[place] = 0
        plan.num_drafts_wanted = lengths

    def on_finish(self, request: Request, detail: str | None, now: float) -> None:
        """Proposers learn from its output."""
        if self._proposer is not None:
            for sequence in request.sequences:
                self._proposer.learn(sequence.output_token_ids, request.scope)

    def _decodes(self, rows: Int64Array) -> Int64Array:
        """Those of the rows, in flight or not, that have a token and compute no more than their
        last."""
        batch = self._batch
        num_left = batch.lengths(rows) - batch.num_computed_tokens[rows]
        return rows[(num_left <= 1) & (batch.num_tokens[rows] > batch.num_prompt_tokens[rows])]

    def _choose(self, rows: Int64Array) -> Int64Array:
        return self._lengths.choose(rows, self._batch.order)

    def _begin_new(self, rows: Int64Array) -> None:
        """Rows that another sequence had begin anew."""
        is_new = self._generation[rows] != self._batch.generation[rows]
        if np.count_nonzero(is_new):
            new = rows[is_new]
            self._generation[new] = self._batch.generation[new]
            self._is_held[new], self._found[new], self._try_at[new] = False, 1.0, 0

    def _hold_back(self, rows: Int64Array, wants: BoolArray) -> BoolArray:
        """Which of the rows that want drafts are not in flight, so that they can have some now."""
        batch = self._batch
        is_held = self._is_held[rows]
        released = rows[is_held & ~wants]
        batch.may_schedule_async[released] = True
        taken = rows[wants & ~is_held & batch.may_schedule_async[rows]]
        batch.may_schedule_async[taken] = False
        self._is_held[released], self._is_held[taken] = False, True
        is_in_flight = (batch.num_output_placeholders[rows] > 0) | batch.is_blocked[rows]
        return wants & ~is_in_flight
