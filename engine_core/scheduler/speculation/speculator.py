"""Drafts for the next step, and what became of those of the last."""

import numpy as np

from engine_core.scheduler.batch_state import BoolArray, Int64Array
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.plan import ModelRunnerOutput, PlanBuilder
from engine_core.scheduler.request import Request, Sequence
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.speculation.base import Proposer
from engine_core.scheduler.speculation.draft_lengths import DraftLengths
from engine_core.scheduler.token_budget.base import Float64Array, StepLoad

_SLO_MARGIN = 0.05
_PLAIN_STEPS = 4
"""Without drafts that the runner makes, at each number of sequences: to know what these cost."""
_FOUND_DECAY = 0.8
_TRY_AFTER = 16
"""Tokens between two attempts of a sequence for which the proposer mostly knows nothing, where an
attempt costs a step in flight."""


class Speculator:
    """Asks the proposer for drafts of running decodes, as many as `DraftLengths` says.

    With steps in flight a sequence that is to get drafts is held back: it is not scheduled before
    its last token is known. The others are.

    `proposer`: None: the runner makes the drafts (`num_wanted`)."""

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
            num_plain_steps=_PLAIN_STEPS if proposer is None else 0,
        )
        self._is_async = config.max_steps_in_flight > 1
        self._generation: Int64Array = np.full(batch.max_num_rows, -1, np.int64)
        """Of each row, when the next two were last true."""
        self._is_held: BoolArray = np.zeros(batch.max_num_rows, np.bool_)
        self._found: Float64Array = np.ones(batch.max_num_rows)
        """How many attempts found drafts, of the last ones."""

    # ------------------------------------------------------------------ what a step tells

    def observe_drafts(self, step: InFlightStep, output: ModelRunnerOutput) -> None:
        """How many were accepted; before the step's tokens are appended."""
        drafts = step.plan.scheduled_spec_decode_tokens
        if not drafts:
            return
        for name, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            sequence = self._pool.find_sequence(name) if name in drafts else None
            if sequence is not None and step.batch.position_of(sequence) is not None:
                assert sequence.row is not None
                num_accepted = max(0, len(token_ids) - 1)
                self._lengths.observe_drafts(sequence.row, len(drafts[name]), num_accepted)

    def observe_time(self, step: InFlightStep, duration_s: float) -> None:
        """Of a step that is over, if it computed nothing but last tokens and drafts. Those that the
        runner makes take time in the step that makes them and in the one that verifies them."""
        plan = step.plan
        num_drafts = sum(map(len, plan.scheduled_spec_decode_tokens.values()))
        num_sequences = len(plan.batch.req_ids)
        if num_sequences and plan.total_num_scheduled_tokens == num_sequences + num_drafts:
            if plan.num_drafts_wanted is not None:
                num_drafts = (num_drafts + int(plan.num_drafts_wanted.sum()) + 1) // 2
            num_tokens = num_sequences + num_drafts
            num_context = int(plan.batch.num_computed_tokens.sum()) + num_sequences
            load = StepLoad(num_tokens, num_sequences, num_context, num_context)
            self._lengths.observe_step(load, duration_s)

    # ------------------------------------------------------------------ what the next one gets

    def propose(self) -> None:
        """Drafts for all running sequences whose last token alone is to be computed next."""
        batch, proposer = self._batch, self._proposer
        rows = self._decodes(batch.order)
        if proposer is None or not len(rows):
            return
        lengths = self._choose(rows)
        if self._is_async:
            is_ready = self._hold_back(rows, lengths)
            rows, lengths = rows[is_ready], lengths[is_ready]
        proposed: dict[int, Sequence] = {}
        for index in np.flatnonzero(lengths).tolist():
            row = int(rows[index])
            sequence = self._pool.sequence_in(row)
            most = min(int(lengths[index]), sequence.max_drafts(self._max_model_len))
            if most < 1 or sequence.request.beam_search is not None:
                continue
            tokens = batch.token_ids[row, sequence.request.embeds_stop : batch.num_tokens[row]]
            drafts = proposer.propose(tokens, sequence.request.scope, most)
            sequence.spec_token_ids = drafts[:most]
            if drafts:
                proposed[row] = sequence
            if self._is_async:
                found = _FOUND_DECAY * self._found[row]
                self._found[row] = found + (1 - _FOUND_DECAY) * bool(drafts)
        if not proposed:
            return
        counts = np.array([len(each.spec_token_ids) for each in proposed.values()])
        if not self._lengths.are_worth_a_step(np.array([*proposed]), counts, len(batch.order)):
            for sequence in proposed.values():
                sequence.spec_token_ids = []

    def num_wanted(self, plan: PlanBuilder) -> Int64Array | None:
        """Drafts that the runner is to make for each sequence of a plan behind what it samples;
        None if a proposer makes them."""
        rows, _ = plan.scheduled_rows
        if self._proposer is not None or not len(rows):
            return None
        lengths = np.zeros(len(rows), np.int64)
        is_decode = np.isin(rows, self._decodes(rows))
        if is_decode.any():
            lengths[is_decode] = self._choose(rows[is_decode])
        for place in np.flatnonzero(lengths).tolist():
            if self._pool.sequence_in(int(rows[place])).request.beam_search is not None:
                lengths[place] = 0
        return lengths

    def learn(self, request: Request) -> None:
        """From a request that is over."""
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
        order = self._batch.order
        return self._lengths.choose(rows, len(order), int(self._batch.num_tokens[order].sum()))

    def _hold_back(self, rows: Int64Array, lengths: Int64Array) -> BoolArray:
        """Which of the rows are not in flight, so that they can have drafts now."""
        batch = self._batch
        new = rows[self._generation[rows] != batch.generation[rows]]
        self._generation[new] = batch.generation[new]
        self._is_held[new], self._found[new] = False, 1.0
        is_held = self._is_held[rows]
        wants = lengths > 0
        wants &= (self._found[rows] >= 0.5) | (batch.num_tokens[rows] % _TRY_AFTER == 0)
        released = rows[is_held & ~wants]
        batch.may_schedule_async[released] = True
        taken = rows[wants & ~is_held & batch.may_schedule_async[rows]]
        batch.may_schedule_async[taken] = False
        self._is_held[released], self._is_held[taken] = False, True
        is_in_flight = (batch.num_output_placeholders[rows] > 0) | batch.is_blocked[rows]
        return wants & ~is_in_flight
