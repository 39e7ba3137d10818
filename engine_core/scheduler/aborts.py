"""Requests and samples that end because somebody says so: a client, a deadline, a fault."""

from collections.abc import Iterable

from engine_core.scheduler.in_flight import InFlightSteps
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool


class Aborts:
    """What steps in flight were to compute for them is not there: no block of it stays cached."""

    def __init__(self, pool: RequestPool, in_flight: InFlightSteps) -> None:
        self._pool = pool
        self._in_flight = in_flight
        self._samples_to_finish: dict[tuple[str, int], RequestStatus] = {}

    def finish_requests(
        self, ids: str | Iterable[str], status: RequestStatus, detail: str | None = None
    ) -> None:
        """See `Scheduler.finish_requests`."""
        if not status.is_finished:
            raise ValueError(
                f"finished_status is {status.name}, it must be one of "
                f"{[status.name for status in RequestStatus if status.is_finished]}"
            )
        for request_id in [ids] if isinstance(ids, str) else list(ids):
            request = self._pool.by_id.get(request_id)
            if request is not None:
                self.drop_uncomputed(request, everything=status is RequestStatus.FINISHED_ERROR)
                self._pool.finish_request(request, status, detail)

    def finish_sample(self, request_id: str, index: int, status: RequestStatus) -> None:
        """See `Scheduler.finish_sample`."""
        request = self._pool.by_id.get(request_id)
        if request is None or request.beam_search is not None:
            return
        if not 0 <= index < request.num_sequences:
            return
        is_running = request.status is RequestStatus.RUNNING
        is_whole = len(request.sequences) == request.num_sequences
        if not is_whole or (is_running and request.has_pending_forks):
            self._samples_to_finish[request_id, index] = status
            return
        sample = request.sequences[index]
        if sample.status.is_finished:
            return
        num_in_flight = self._in_flight.num_tokens_in_flight(sample)
        self._drop_computed_from(sample, sample.num_computed_tokens - num_in_flight)
        sample.status = status
        self._pool.emit_output(sample, [])

    def finish_postponed(self) -> None:
        """Samples that did not exist may do so now."""
        if self._samples_to_finish:
            to_finish, self._samples_to_finish = self._samples_to_finish, {}
            for (request_id, index), status in to_finish.items():
                self.finish_sample(request_id, index, status)

    def drop_uncomputed(self, request: Request, *, everything: bool) -> None:
        """A step without a result may not have filled its blocks. `everything`: any block of the
        request may be wrong."""
        for sequence in request.unfinished:
            num_in_flight = self._in_flight.num_tokens_in_flight(sequence)
            first_wrong = 0 if everything else sequence.num_computed_tokens - num_in_flight
            self._drop_computed_from(sequence, first_wrong)

    def _drop_computed_from(self, sequence: Sequence, first_wrong: int) -> None:
        if first_wrong < sequence.num_computed_tokens:
            self._pool.kv_cache.invalidate(sequence, first_wrong)
            sequence.num_computed_tokens = first_wrong
