"""What a fault, or an end in mid-step, leaves behind: nobody may find blocks of doubtful contents.

Decides what is not to be trusted any more. Must not know why it went wrong.
"""

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.in_flight import InFlightStep, InFlightSteps
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.preemption import Preemptor
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus


class Faults:
    """Cleans up behind requests and steps that went wrong."""

    def __init__(
        self,
        live: RequestPool,
        kv_cache: KVCacheManager,
        steps: InFlightSteps,
        preemptor: Preemptor,
    ) -> None:
        self._live = live
        self._kv_cache = kv_cache
        self._steps = steps
        self._preemptor = preemptor

    def forget_what_is_not_computed(self, request: Request, *, everything: bool) -> None:
        """Of a step without a result nobody knows whether it will fill its blocks; and what went
        wrong with a request may be in any of its blocks (`everything`)."""
        for sequence in request.unfinished:
            first_wrong = 0
            if not everything:
                num_in_flight = self._steps.num_tokens_in_flight(sequence)
                first_wrong = sequence.num_computed_tokens - num_in_flight
            if first_wrong < sequence.num_computed_tokens:
                self._kv_cache.invalidate(sequence, first_wrong)
                sequence.num_computed_tokens = first_wrong

    def discard(self, steps: list[InFlightStep], detail: str) -> None:
        """The first of these steps could not be run, and the others were planned behind it: their
        requests end with this detail. What earlier steps computed is good, unless there were
        copies: nobody knows which of them were made; or several steps: what the first was to
        compute may have been given back, found and copied by those behind it."""
        is_unclear = len(steps) > 1 or not steps[0].plan.copies.is_empty
        for step in steps:
            for request in self._requests_of(step.plan):
                self.forget_what_is_not_computed(request, everything=is_unclear)
                self._live.end(request, RequestStatus.FINISHED_ERROR, detail)
        if is_unclear:
            self._preemptor.compute_again(
                [
                    request
                    for request in self._live.waiting
                    if request.status is RequestStatus.SWAPPED
                    and request.preemptions[-1].step_id >= steps[0].plan.step_id
                ]
            )
            self._kv_cache.reset_prefix_cache()

    def _requests_of(self, plan: SchedulerOutput) -> list[Request]:
        """Those that run in the step, or came back with it; without those that are over."""
        names = [*plan.batch.req_ids, *(again.req_id for again in plan.resumed_reqs)]
        sequences = [self._live.find_sequence(name) for name in names]
        requests = {
            sequence.request.request_id: sequence.request
            for sequence in sequences
            if sequence is not None and sequence.row is not None
        }
        return list(requests.values())
