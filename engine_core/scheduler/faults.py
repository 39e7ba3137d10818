"""After a fault, or an end in mid-step: blocks of doubtful contents leave the prefix cache."""

from engine_core.scheduler.in_flight import InFlightSteps
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.preemption import Preemptor
from engine_core.scheduler.request import Request, RequestStatus
from engine_core.scheduler.request_pool import RequestPool


class Faults:
    """Ends the requests of failed steps, and drops what they may have spoilt."""

    def __init__(self, pool: RequestPool, in_flight: InFlightSteps, preemptor: Preemptor) -> None:
        self._pool = pool
        self._kv_cache = pool.kv_cache
        self._in_flight = in_flight
        self._preemptor = preemptor

    def drop_uncomputed(self, request: Request, *, everything: bool) -> None:
        """A step without a result may not have filled its blocks. `everything`: any block of the
        request may be wrong."""
        for sequence in request.unfinished:
            first_wrong = 0
            if not everything:
                num_in_flight = self._in_flight.num_tokens_in_flight(sequence)
                first_wrong = sequence.num_computed_tokens - num_in_flight
            if first_wrong < sequence.num_computed_tokens:
                self._kv_cache.invalidate(sequence, first_wrong)
                sequence.num_computed_tokens = first_wrong

    def discard_steps(self, detail: str) -> None:
        """The first step in flight failed and the others were planned behind it: the requests of
        all end with this detail. What earlier steps computed is kept, unless there were copies
        (which of them were made is not known) or several steps (blocks that the first was to fill
        may have been freed, found and copied by those behind it)."""
        steps = self._in_flight.steps
        is_unclear = len(steps) > 1 or not steps[0].plan.copies.is_empty
        for step in steps:
            step.is_discarded = True
            for request in self._requests_of(step.plan):
                self.drop_uncomputed(request, everything=is_unclear)
                self._pool.finish_request(request, RequestStatus.FINISHED_ERROR, detail)
        if is_unclear:
            self._preemptor.recompute_swapped(
                [
                    request
                    for request in self._pool.waiting
                    if request.status is RequestStatus.SWAPPED
                    and request.preemptions[-1].step_id >= steps[0].plan.step_id
                ]
            )
            self._kv_cache.reset_prefix_cache()

    def _requests_of(self, plan: SchedulerOutput) -> list[Request]:
        """Running requests that the step computes or that came back with it."""
        names = [*plan.batch.req_ids, *(resumed.req_id for resumed in plan.resumed_reqs)]
        sequences = [self._pool.find_sequence(name) for name in names]
        requests = {
            sequence.request.request_id: sequence.request
            for sequence in sequences
            if sequence is not None and sequence.row is not None
        }
        return list(requests.values())
