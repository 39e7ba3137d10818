"""With pipeline parallelism: what of the work makes up the next micro-batch, so that every stage
has one."""

import numpy as np

from engine_core.scheduler.batch_state import BatchState, Int64Array
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.in_flight import InFlightSteps
from engine_core.scheduler.request_pool import RequestPool

_CHUNKS_A_STAGE = 2
"""The prompts at hand are cut into so many for each stage: while a pipeline fills and drains, fewer
stages wait the more there are."""


class MicroBatches:
    """A plan is a micro-batch; P of them are in flight, each in another stage, a sequence that is
    sampled in one of them only:

        stage 0   [ A ][ B ][ A' ][ B' ]      A' has the tokens that A sampled, so it is planned
        stage 1        [ A ][ B  ][ A' ]      when A has left the last stage

    Decodes: of D sequences P plans in a row take D together, none twice, evenly; each plan the
    first ones that are not in flight. So none waits for more than P plans. Beams stay together.

    Prompts: their chunks need no sampled token and may follow each other in successive plans. The
    tokens that are left (in flight, running or waiting) are cut into chunks of one size, unless
    that is below `min_micro_batch_tokens`, where reading the weights again takes longer than a
    stage would have waited."""

    def __init__(
        self, pool: RequestPool, in_flight: InFlightSteps, config: SchedulerConfig
    ) -> None:
        self._pool = pool
        self._in_flight = in_flight
        self._num_stages = config.pipeline_parallel_size
        # all sequences of a request may need a token at once
        self._min_tokens = max(config.min_micro_batch_tokens, config.max_num_seqs)

    @property
    def rows(self) -> Int64Array:
        """The running sequences that the next plan's token budget is for."""
        batch = self._pool.batch
        return batch.order if self._num_stages == 1 else self.part_of(batch.schedulable)

    def part_of(self, rows: Int64Array) -> Int64Array:
        """This plan's rows, of those that can be scheduled, in order."""
        if self._num_stages == 1:
            return rows
        batch = self._pool.batch
        num_decodes = int(np.count_nonzero(_num_left(batch, batch.order) <= 1))
        turn = self._in_flight.next_step_id % self._num_stages
        share = max(1, (num_decodes + turn) // self._num_stages)
        decodes = np.flatnonzero(_num_left(batch, rows) == 1)
        if len(decodes) <= share:
            return rows
        stop = share
        while stop < len(decodes) and self._are_beams(*rows[decodes[stop - 1 : stop + 1]]):
            stop += 1
        return np.delete(rows, decodes[stop:])

    def limit(self, budget: int) -> int:
        """Most tokens of the next plan, no more than `budget`."""
        if self._num_stages == 1:
            return budget
        batch, pool = self._pool.batch, self._pool
        num_left = _num_left(batch, self.rows)
        num_decodes = int(np.count_nonzero(num_left == 1))
        num_tokens = int(num_left.sum()) - num_decodes + pool.num_queued_tokens
        for step in self._in_flight.steps:
            num_tokens += step.plan.total_num_scheduled_tokens - len(step.plan.batch.rows)
        chunk = -(-num_tokens // (_CHUNKS_A_STAGE * self._num_stages))
        return min(budget, num_decodes + max(chunk, self._min_tokens))

    def _are_beams(self, row: int, other: int) -> bool:
        """Whether the rows have beams of one request."""
        first, second = map(self._pool.sequence_in, (row, other))
        return first.request is second.request and first.request.beam_search is not None


def _num_left(batch: BatchState, rows: Int64Array) -> Int64Array:
    """Tokens to compute; 0 for a sequence that is sampled in flight."""
    num_left: Int64Array = batch.lengths(rows) - batch.num_computed_tokens[rows]
    return num_left
