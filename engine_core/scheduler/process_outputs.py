"""Takes in what a step sampled: tokens to their sequences, stops, outputs.

Owns what becomes of a sampled token. Must not know how the step was chosen. Sequences of which
there is nothing to say but their next token are handled as columns; the others one by one.
"""

import numpy as np

from engine_core.scheduler.batch_state import Int32Array
from engine_core.scheduler.forking import SequenceForks
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.outputs import trim_logprobs
from engine_core.scheduler.plan import ModelRunnerOutput
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence import Sequence
from engine_core.scheduler.stop import append_until_stop
from protocol.outputs import Logprobs

_NO_ROWS: Int32Array = np.zeros(0, np.int32)


class ModelOutputProcessor:
    """
    Args:
        max_model_len: most tokens of a sequence.
    """

    def __init__(self, live: RequestPool, branches: SequenceForks, *, max_model_len: int) -> None:
        self._live = live
        self._branches = branches
        self._max_model_len = max_model_len

    def take(self, step: InFlightStep, result: ModelRunnerOutput, now: float) -> Int32Array:
        """Returns the rows that got their next token as columns."""
        beams: dict[str, dict[str, Logprobs | None]] = {}
        logprobs = result.logprobs or {}
        rows = _NO_ROWS
        if isinstance(result.sampled_token_ids, np.ndarray):
            rows, sampled = self._take_columns(step, result.sampled_token_ids)
        else:
            sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
            sampled = {name: sampled.get(name, []) for name in step.plan.batch.req_ids}
        drafts = step.plan.scheduled_spec_decode_tokens
        for name, token_ids in sampled.items():
            sequence = self._live.find_sequence(name)
            position = None if sequence is None else step.position_of(sequence)
            if sequence is None or position is None:
                continue  # it ended, or was preempted, while in flight
            if sequence.request.beam_search is not None:
                beams.setdefault(sequence.request.request_id, {})[name] = logprobs.get(name)
            else:
                # a prompt that goes on may be due in a later step that is planned already
                most = 1 + len(drafts.get(name, ())) if step.needs_sampling[position] else 0
                self._take_tokens(sequence, token_ids, most, logprobs.get(name), now)
        for request_id, reported in beams.items():
            self._take_beams(self._live.by_id[request_id], reported)
        return rows

    # ------------------------------------------------------------------ columns

    def _take_columns(
        self, step: InFlightStep, token_ids: Int32Array
    ) -> tuple[Int32Array, dict[str, list[int]]]:
        """Appends and tells what is plain. Returns its rows, and the tokens of the others."""
        state, stop_tokens = self._live.rows, self._live.stop_tokens
        needs_sampling = step.needs_sampling
        if not step.batch.all_unchanged:
            needs_sampling = needs_sampling & step.batch.unchanged()
        places, tokens = step.batch.places, token_ids
        # count_nonzero costs a fraction of all() where rows are few
        if np.count_nonzero(needs_sampling) < len(needs_sampling):
            places, tokens = places[needs_sampling], tokens[needs_sampling]
        stops = state.num_tokens[places] + 1
        is_plain = state.is_plain[places]
        is_plain &= stops < state.stop_length[places]
        if not stop_tokens.is_empty:
            is_plain &= ~stop_tokens.hit_by(tokens)
        others: dict[str, list[int]] = {}
        if np.count_nonzero(is_plain) < len(is_plain):
            is_other = ~is_plain
            for row, token_id in zip(
                places[is_other].tolist(), tokens[is_other].tolist(), strict=True
            ):
                sequence = state.sequences[row]
                assert sequence is not None
                others[sequence.sequence_id] = [token_id]
            places, tokens, stops = places[is_plain], tokens[is_plain], stops[is_plain]
        state.token_ids[places, stops - 1] = tokens
        state.num_tokens[places] = stops
        self._live.counters.num_generated_tokens += len(places)
        rows = places.astype(np.int32)
        self._live.outputs.add_tokens(rows, tokens)
        return rows, others

    # ------------------------------------------------------------------ one by one

    def _take_tokens(
        self,
        sequence: Sequence,
        token_ids: list[int],
        most: int,
        logprobs: Logprobs | None,
        now: float,
    ) -> None:
        """Nothing before the sequence's tokens are all computed, else one token behind the accepted
        drafts, `most` if all of them are."""
        request, state, row = sequence.request, self._live.rows, sequence.row
        assert row is not None
        least = min(1, most)
        if not least <= len(token_ids) <= most:
            why = (
                f"the model runner returned {len(token_ids)} tokens, from {least} to {most} were "
                "due; this is a fault of the engine, please report it"
            )
            self._live.end(request, RequestStatus.FINISHED_ERROR, why)
            return
        if not most:
            return
        if request.has_branches_due:
            self._branches.fork(request)
        # rejected drafts were computed for nothing: their slots are written again
        sequence.num_computed_tokens -= most - len(token_ids)
        kept = append_until_stop(sequence, token_ids, self._max_model_len)
        if np.isnan(state.first_token_s[row]):
            state.first_token_s[row] = now
        if logprobs is not None:
            logprobs = trim_logprobs(logprobs, len(kept))
        self._live.tell(sequence, kept, logprobs)
        state.is_plain[row] = request.sampling_params.logprobs is None

    def _take_beams(self, request: Request, reported: dict[str, Logprobs | None]) -> None:
        """All beams advance together. One that has caught up before the others computes its last
        token once more: it is due again when they are."""
        beams = request.unfinished
        due = [seq for seq in beams if seq.row is not None and _has_caught_up(seq)]
        if len(due) < len(beams):
            for sequence in due:
                self._branches.roll_back(sequence)
            if due and request.has_branches_due:
                self._branches.fork(request)
            return
        logprobs = [reported.get(sequence.sequence_id) for sequence in beams]
        found = [columns for columns in logprobs if columns is not None]
        if len(found) < len(beams):
            why = (
                "the model runner reported no log-probabilities; this is a fault, please report it"
            )
            self._live.end(request, RequestStatus.FINISHED_ERROR, why)
            return
        self._branches.advance_beams(request, found)


def _has_caught_up(sequence: Sequence) -> bool:
    return sequence.num_computed_tokens >= sequence.num_tokens
