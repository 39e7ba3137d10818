"""What becomes of the tokens that a step sampled: appended, checked for a stop, and emitted."""

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.batch_state import Int32Array, Int64Array
from engine_core.scheduler.forking import SequenceForks
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.part import SchedulerParts
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.runner_output import ModelRunnerOutput
from engine_core.scheduler.stop import append_until_stop
from protocol.outputs import Logprobs
from protocol.pooling import Pooled

_NO_ROWS: Int64Array = np.zeros(0, np.int64)


class StepOutputProcessor:
    """Sequences on the fast path are handled as columns, the others one by one."""

    def __init__(
        self,
        pool: RequestPool,
        max_model_len: int,
        parts: SchedulerParts,
        draft_method: str,
    ) -> None:
        self._pool = pool
        self._parts = parts
        self._draft_method = draft_method
        self._forks = SequenceForks(pool)
        self._max_model_len = max_model_len
        self._answered: list[Sequence] = []

    def process(self, step: InFlightStep, output: ModelRunnerOutput, now: float) -> Int64Array:
        """Returns the rows that got their next token as columns."""
        for name, (start, columns) in output.prompt_logprobs.items():
            self._process_prompt(step, name, start, columns)
        beams: dict[str, dict[str, Logprobs | None]] = {}
        logprobs = output.logprobs or {}
        rows = _NO_ROWS
        if isinstance(output.sampled_token_ids, np.ndarray):
            if step.plan.num_decode_steps > 1:
                sampled = self._process_steps(step, output.sampled_token_ids)
            else:
                rows, sampled = self._process_columns(step, output)
        else:
            sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
            sampled = {name: sampled.get(name, []) for name in step.plan.batch.req_ids}
        drafts = step.plan.scheduled_spec_decode_tokens
        for name, token_ids in sampled.items():
            sequence = self._pool.find_sequence(name)
            position = None if sequence is None else step.batch.position_of(sequence)
            if sequence is None or position is None:
                continue  # it ended, or was preempted, while in flight
            if not sequence.request.generates:
                if step.needs_sampling[position]:
                    self._process_pooled(sequence, output.pooled.get(name))
            elif sequence.request.beam_search is not None:
                beams.setdefault(sequence.request.request_id, {})[name] = logprobs.get(name)
            else:
                # a prompt that goes on may sample in a later step that is planned already
                num_drafts = len(drafts.get(name, ()))
                most = 1 + num_drafts if step.needs_sampling[position] else 0
                if step.plan.num_decode_steps > 1:
                    most = int(step.plan.batch.num_scheduled_tokens[position])
                self._process_sequence(
                    sequence, token_ids, most, num_drafts, logprobs.get(name), now
                )
        for request_id, reported in beams.items():
            self._process_beams(self._pool.by_id[request_id], reported)
        return rows

    # ------------------------------------------------------------------ columns

    def _process_columns(
        self, step: InFlightStep, output: ModelRunnerOutput
    ) -> tuple[Int64Array, dict[str, list[int]]]:
        """Appends and emits the tokens of the fast path. Returns its rows, and the tokens of the
        other sequences."""
        batch, stop_tokens = self._pool.batch, self._pool.stop_tokens
        needs_sampling = step.needs_sampling
        if not step.batch.all_unchanged:
            needs_sampling = needs_sampling & step.batch.unchanged()
        rows, tokens = step.batch.rows, output.sampled_token_ids
        assert isinstance(tokens, np.ndarray)
        # count_nonzero costs a fraction of all() where rows are few
        if np.count_nonzero(needs_sampling) < len(needs_sampling):
            rows, tokens = rows[needs_sampling], tokens[needs_sampling]
        lengths = batch.num_tokens[rows] + 1
        fast = batch.fast_path[rows]
        fast &= lengths < batch.max_len[rows]
        if not stop_tokens.is_empty:
            fast &= ~stop_tokens.may_stop(tokens)
        if step.plan.scheduled_spec_decode_tokens:
            fast &= step.plan.batch.num_scheduled_tokens[needs_sampling] == 1
        others: dict[str, list[int]] = {}
        if np.count_nonzero(fast) < len(fast):
            slow = ~fast
            for row, token_id in zip(rows[slow].tolist(), tokens[slow].tolist(), strict=True):
                name = batch.sequence_ids[row]
                others[name] = output.verified_token_ids.get(name, [token_id])
            rows, tokens, lengths = rows[fast], tokens[fast], lengths[fast]
        batch.token_ids[rows, lengths - 1] = tokens
        batch.num_tokens[rows] = lengths
        self._pool.counters.num_generated_tokens += len(rows)
        self._pool.outputs.add_tokens(rows, tokens)
        return rows, others

    def _process_steps(self, step: InFlightStep, token_ids: Int32Array) -> dict[str, list[int]]:
        """Append and emit the fast path's tokens of several decode steps, [R, K]. Returns those of
        the other sequences, some of which end among them."""
        pool, batch, rows = self._pool, self._pool.batch, step.batch.rows
        counts, num_steps = step.plan.batch.num_scheduled_tokens, step.plan.num_decode_steps
        lengths = batch.num_tokens[rows]
        fast = batch.fast_path[rows] & (counts == num_steps) & step.batch.unchanged()
        fast &= lengths + num_steps < batch.max_len[rows]
        if not pool.stop_tokens.is_empty:
            fast &= ~pool.stop_tokens.may_stop(token_ids).any(axis=1)
        others = {
            batch.sequence_ids[rows[place]]: token_ids[place, : counts[place]].tolist()
            for place in np.flatnonzero(~fast & step.batch.unchanged()).tolist()
        }
        rows, lengths, token_ids = rows[fast], lengths[fast], token_ids[fast]
        batch.token_ids[rows[:, None], lengths[:, None] + np.arange(num_steps)] = token_ids
        batch.num_tokens[rows] = lengths + num_steps
        for row, tokens in zip(rows.tolist(), token_ids.tolist(), strict=True):
            pool.emit_output(pool.sequence_in(row), tokens)
        return others

    # ------------------------------------------------------------------ one by one

    def _process_prompt(self, step: InFlightStep, name: str, start: int, columns: Logprobs) -> None:
        """Emit what of a prompt's log-probabilities was not emitted before: a preempted request
        computes some again. One that was preempted in flight gets them too: swapped, it goes on
        behind them."""
        request = self._pool.by_id.get(name)
        report = None if request is None else request.report
        if request is None or report is None or step.plan.step_id < request.first_step_id:
            return  # it ended while in flight, and another may have its id
        num_known = report.num_logprobs + 1 - start
        if 0 <= num_known < columns.num_positions:
            new = columns.part(num_known, columns.num_positions)
            report.num_logprobs += new.num_positions
            self._pool.outputs.add_prompt_logprobs(request, new)

    def _process_pooled(self, sequence: Sequence, answer: npt.NDArray[np.float32] | None) -> None:
        """All of its prompt is computed: it ends."""
        if answer is None:
            why = "the model runner pooled nothing; this is a fault of the engine, please report it"
            self._pool.finish_request(sequence.request, RequestStatus.FINISHED_ERROR, why)
            return
        sequence.status = RequestStatus.FINISHED_STOPPED
        pooled = Pooled(shape=answer.shape, data=answer.astype("<f4", copy=False).tobytes())
        self._pool.outputs.add(sequence, [], is_over=True, pooled=pooled)
        self._answered.append(sequence)

    def end_answered(self) -> None:
        """End pooled sequences, once their answers have been sent."""
        answered, self._answered = self._answered, []
        for sequence in answered:
            self._pool.end_sequence(sequence)

    def _process_sequence(
        self,
        sequence: Sequence,
        token_ids: list[int],
        most: int,
        num_drafts: int,
        logprobs: Logprobs | None,
        now: float,
    ) -> None:
        """No token before the sequence's tokens are all computed; then the accepted drafts and one
        token more, `most` if all drafts are accepted."""
        request, batch, row = sequence.request, self._pool.batch, sequence.row
        assert row is not None
        least = min(1, most)
        if not least <= len(token_ids) <= most:
            why = (
                f"the model runner returned {len(token_ids)} tokens, from {least} to {most} were "
                "expected; this is a fault of the engine, please report it"
            )
            self._pool.finish_request(request, RequestStatus.FINISHED_ERROR, why)
            return
        if not most:
            return
        if request.has_pending_forks:
            self._forks.fork(request)
        # the results of rejected drafts are discarded: their slots are written again
        sequence.num_computed_tokens -= most - len(token_ids)
        kept = append_until_stop(sequence, token_ids, self._max_model_len)
        if num_drafts:
            self._count_drafts(sequence, num_drafts, min(len(kept), len(token_ids) - 1))
            if not sequence.has_forced_drafts:
                for on_drafts in self._parts.on_drafts:
                    on_drafts(row, num_drafts, len(token_ids) - 1)
        if np.isnan(batch.first_token_s[row]):
            batch.first_token_s[row] = now
        if logprobs is not None:
            logprobs = logprobs.part(0, len(kept))
        self._pool.emit_output(sequence, kept, logprobs)
        batch.fast_path[row] = request.sampling_params.has_plain_outputs

    def _count_drafts(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        counters, account = self._pool.counters, sequence.request.account
        method = "grammar" if sequence.has_forced_drafts else self._draft_method
        counters.num_draft_tokens_by_method[method] += num_drafts
        counters.num_accepted_tokens_by_method[method] += num_accepted
        counters.num_drafts += 1
        counters.num_draft_tokens += num_drafts
        counters.num_accepted_tokens += num_accepted
        account.num_draft_tokens += num_drafts
        account.num_accepted_tokens += num_accepted

    def _process_beams(self, request: Request, reported: dict[str, Logprobs | None]) -> None:
        """All beams advance together. One that catches up before the others computes its last token
        again, to sample when they do."""
        beams = request.unfinished
        ready = [
            beam
            for beam in beams
            if beam.row is not None and beam.num_computed_tokens >= beam.num_tokens
        ]
        if len(ready) < len(beams):
            for beam in ready:
                self._forks.recompute_last_token(beam)
            if ready and request.has_pending_forks:
                self._forks.fork(request)
            return
        logprobs = [reported.get(beam.sequence_id) for beam in beams]
        found = [columns for columns in logprobs if columns is not None]
        if len(found) < len(beams):
            why = (
                "the model runner reported no log-probabilities; this is a fault, please report it"
            )
            self._pool.finish_request(request, RequestStatus.FINISHED_ERROR, why)
            return
        self._forks.advance_beams(request, found)
