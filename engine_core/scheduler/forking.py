"""From one sequence to several: parallel samples when the prompt is computed, beams at every step.

Owns which sequences a request has. Blocks are shared on the way; the first write into a shared
block copies it. Must not know budgets or queues.

    prompt  A B C D | E F        block 0 is shared for good, block 1 until each writes behind F
    n = 3           | E F x..    sample 0
                    | E F y..    sample 1, computes F again: its logits give its first token
                    | E F z..    sample 2
"""

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.beam_search import BeamCandidates, BeamSurvivor
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence import Sequence
from protocol.outputs import FinishReason, Logprobs


class SequenceForks:
    """Makes and replaces the sequences of running requests."""

    def __init__(self, live: RequestPool, kv_cache: KVCacheManager) -> None:
        self._live = live
        self._kv_cache = kv_cache

    # ------------------------------------------------------------------ samples

    def fork(self, request: Request) -> None:
        """The request's first sequence has caught up: the others go on from its prompt. Those that
        are new start with the prompt's last token, whose logits give them a token of their own;
        those that were preempted keep their output."""
        trunk = next(sequence for sequence in request.unfinished if sequence.row is not None)
        if request.beam_search is None:
            for index in range(len(request.sequences), request.num_sequences):
                request.sequences.append(self._live.new_branch(request, index))
        for sequence in request.unfinished:
            if sequence.row is None:
                self._start_behind_prompt(trunk, sequence)
                sequence.status = RequestStatus.RUNNING
                self._live.place(sequence)
        self._share_tail(trunk)
        self._live.allow_async(request)
        self._live.restore_order()

    def _start_behind_prompt(self, trunk: Sequence, branch: Sequence) -> None:
        num_prompt = trunk.num_prompt_tokens
        is_at_prompt = trunk.num_tokens == num_prompt
        if is_at_prompt or all(spec.sliding_window is None for spec in self._kv_cache.groups):
            branch.num_computed_tokens = min(num_prompt, branch.num_tokens - 1)
            self._kv_cache.fork(trunk, branch, num_prompt)
        else:
            # the window at the prompt's end may be gone: what the cache has of it is found by hash
            hit = self._kv_cache.find_cached_prefix(branch)
            self._kv_cache.allocate_cached(branch, hit)
            branch.num_computed_tokens = hit.num_tokens

    def _share_tail(self, sequence: Sequence) -> None:
        """Its last block may be shared now: the cache is asked before the next write. So it is for
        a sequence that the runner is to be told of, which happens on that occasion."""
        num_allocated_slots = (
            self._kv_cache.num_allocated_slots(sequence) if sequence.has_runner_row else 0
        )
        self._live.rows.num_allocated_slots[sequence.row] = num_allocated_slots

    # ------------------------------------------------------------------ beams

    def advance_beams(self, request: Request, logprobs: list[Logprobs]) -> None:
        """One step of the search. Beams that nobody goes on from give their rows and blocks to
        copies of those that several go on from.

        Args:
            logprobs: of each running beam, by index.
        """
        search = request.beam_search
        assert search is not None
        step = search.advance(BeamCandidates.from_logprobs(logprobs))
        if step.is_over:
            self._finish(request)
            return
        beams = request.unfinished
        successors = [self._successor(beams, place, s) for place, s in enumerate(step.survivors)]
        for place, beam in enumerate(beams):
            if place >= len(successors) or successors[place] is not beam:
                self._kv_cache.free(beam)
        for place, (sequence, survivor) in enumerate(zip(successors, step.survivors, strict=True)):
            if place >= len(beams):
                self._live.place(sequence)
            elif sequence is not beams[place]:
                row = self._live.unplace(beams[place])
                self._live.forget_sequence(beams[place])
                self._live.place_instead(sequence, row)
            sequence.append_output_token(survivor.token_id)
            self._share_tail(sequence)
            is_kept = place < len(beams) and sequence is beams[place]
            if is_kept and survivor.token_id != sampled_token_id(logprobs[place]):
                self._tell_runner_anew(sequence)
        for beam in beams[len(successors) :]:
            self._live.rows.give_back(self._live.unplace(beam))
            self._live.forget_sequence(beam)
        request.sequences = successors
        self._live.restore_order()

    def roll_back(self, beam: Sequence) -> None:
        """The beam's last token is computed once more: what was sampled behind it is not taken."""
        beam.num_computed_tokens -= 1
        self._tell_runner_anew(beam)

    def _tell_runner_anew(self, beam: Sequence) -> None:
        """The runner's row goes on behind the token that it sampled; the beam does not."""
        beam.has_runner_row = False
        self._live.rows.num_allocated_slots[beam.row] = 0

    def _successor(self, beams: list[Sequence], place: int, survivor: BeamSurvivor) -> Sequence:
        """The beam itself where it goes on from itself, else a copy of its parent."""
        parent = beams[survivor.parent]
        if survivor.parent == place:
            return parent
        copy = self._live.new_branch(parent.request, place)
        copy.set_output(parent.output_token_ids)
        copy.num_computed_tokens = parent.num_computed_tokens
        copy.status = RequestStatus.RUNNING
        self._kv_cache.fork(parent, copy, parent.num_tokens)
        return copy

    def _finish(self, request: Request) -> None:
        assert request.beam_search is not None
        results = request.beam_search.results()
        for place, found in enumerate(results):
            self._live.counters.num_generated_tokens += len(found.token_ids)
            self._live.outputs.add_beam(
                request,
                place,
                found.token_ids,
                found.cumulative_logprob,
                found.finish_reason,
                found.stop_reason,
                is_over=place == len(results) - 1,
            )
        stopped = results[0].finish_reason is FinishReason.STOP
        self._live.finish_beams(
            request,
            RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_LENGTH,
        )


def sampled_token_id(logprobs: Logprobs) -> int:
    """The first entry of a position: what the sampler chose."""
    return int.from_bytes(logprobs.token_ids[:4], "little")
