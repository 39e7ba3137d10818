"""From one sequence to several: samples when the prompt is computed, beams at every step."""

from engine_core.scheduler.records.beam_search import BeamCandidates, BeamSurvivor
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool
from protocol.outputs import FinishReason, Logprobs


class SequenceForks:
    """Makes and replaces the sequences of running requests. They share blocks; the first write into
    a shared block copies it.

        prompt  A B C D | E F        block 0 stays shared, block 1 until each writes behind F
        n = 3           | E F x..    sample 0, the parent
                        | E F y..    sample 1, computes F again: its logits give its first token
                        | E F z..    sample 2
    """

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        self._kv_cache = pool.kv_cache

    # ------------------------------------------------------------------ samples

    def fork(self, request: Request) -> None:
        """The request's first sequence has caught up: the others go on from its prompt. New ones
        start with the prompt's last token, whose logits give them a token of their own; those that
        were preempted keep their output."""
        parent = next(sequence for sequence in request.unfinished if sequence.row is not None)
        if request.beam_search is None:
            for index in range(len(request.sequences), request.num_sequences):
                request.sequences.append(self._pool.new_sequence(request, index))
        for sequence in request.unfinished:
            if sequence.row is None:
                self._share_prompt(parent, sequence)
                sequence.status = RequestStatus.RUNNING
                self._pool.assign_row(sequence)
        self._share_last_block(parent)
        self._pool.allow_async(request)
        self._pool.restore_order()

    def _share_prompt(self, parent: Sequence, child: Sequence) -> None:
        num_prompt = parent.num_prompt_tokens
        kv_cache = self._kv_cache
        if parent.num_tokens == num_prompt or not kv_cache.has_windows:
            child.num_computed_tokens = min(num_prompt, child.num_tokens - 1)
            kv_cache.fork(parent, child, num_prompt)
        else:
            # what the prompt's last token reads may be gone; the prefix cache may have it from
            # some block on
            hit = kv_cache.find_cached_prefix(child)
            if kv_cache.stage(hit):
                hit = kv_cache.no_hit
            kv_cache.allocate_cached(child, hit)
            child.num_computed_tokens = hit.num_tokens

    def _share_last_block(self, sequence: Sequence) -> None:
        """Its last block may be shared now, so the cache is asked before the next write; likewise
        before the runner gets a row for it."""
        num_slots = self._kv_cache.num_allocated_slots(sequence) if sequence.has_runner_row else 0
        self._pool.batch.num_allocated_slots[sequence.row] = num_slots

    # ------------------------------------------------------------------ beams

    def advance_beams(self, request: Request, logprobs: list[Logprobs]) -> None:
        """One step of the search. Beams without a successor give their rows and blocks to copies of
        those that have several. `logprobs`: of each running beam, by index."""
        search = request.beam_search
        assert search is not None
        survivors = search.advance(BeamCandidates.from_logprobs(logprobs))
        if search.is_over:
            self._finish(request)
            return
        beams = request.unfinished
        successors = [self._successor(beams, place, s) for place, s in enumerate(survivors)]
        for place, beam in enumerate(beams):
            if place >= len(successors) or successors[place] is not beam:
                self._kv_cache.free(beam)
        for place, (sequence, survivor) in enumerate(zip(successors, survivors, strict=True)):
            if place >= len(beams):
                self._pool.assign_row(sequence)
            elif sequence is not beams[place]:
                row = self._pool.leave_row(beams[place])
                self._pool.drop_id(beams[place])
                self._pool.assign_row(sequence, row)
            sequence.append_output_token(survivor.token_id)
            self._share_last_block(sequence)
            is_kept = place < len(beams) and sequence is beams[place]
            if is_kept and survivor.token_id != _sampled_token_id(logprobs[place]):
                self._send_again(sequence)
        for beam in beams[len(successors) :]:
            self._pool.free_row(beam)
            self._pool.drop_id(beam)
        request.sequences = successors
        self._pool.restore_order()

    def recompute_last_token(self, beam: Sequence) -> None:
        """Drop what was sampled behind the beam's last token, which is computed again."""
        beam.num_computed_tokens -= 1
        self._send_again(beam)

    def _send_again(self, beam: Sequence) -> None:
        """The runner's row goes on behind the token that it sampled; the beam does not."""
        beam.has_runner_row = False
        self._pool.batch.num_allocated_slots[beam.row] = 0

    def _successor(self, beams: list[Sequence], place: int, survivor: BeamSurvivor) -> Sequence:
        """The beam itself where it goes on from itself, else a copy of its parent."""
        parent = beams[survivor.parent]
        if survivor.parent == place:
            return parent
        child = self._pool.new_sequence(parent.request, place)
        child.set_output(parent.output_token_ids)
        child.num_computed_tokens = parent.num_computed_tokens
        child.status = RequestStatus.RUNNING
        self._kv_cache.fork(parent, child, parent.num_tokens)
        return child

    def _finish(self, request: Request) -> None:
        assert request.beam_search is not None
        results = request.beam_search.results
        for place, found in enumerate(results):
            self._pool.counters.num_generated_tokens += len(found.token_ids)
            is_over = place == len(results) - 1
            self._pool.outputs.add_beam(request, place, found, is_over=is_over)
        is_stopped = results[0].finish_reason is FinishReason.STOP
        self._pool.finish_beams(
            request, RequestStatus.FINISHED_STOPPED if is_stopped else RequestStatus.FINISHED_LENGTH
        )


def _sampled_token_id(logprobs: Logprobs) -> int:
    """The first entry of a position: what the sampler chose."""
    return int.from_bytes(logprobs.token_ids[:4], "little")
