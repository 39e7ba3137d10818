"""All requests of a client, and the way of the engine's outputs to their sequences."""

import dataclasses
import itertools
import logging
import math
import secrets
from collections.abc import Callable

from frontend.errors import InvalidInput, RequestRejected
from frontend.request_state import RequestObserver, RequestState
from protocol.errors import ErrorCode
from protocol.outputs import DecodedTokens, EngineCoreOutput, EngineCoreOutputs, FinishReason
from protocol.requests import Abort, EngineRequest

logger = logging.getLogger(__name__)

_MAX_REQUEST_ID_CHARS = 200


@dataclasses.dataclass(slots=True)
class _SequenceRange:
    """Sequences `[start, stop)` of a request; the engine counts them from 0."""

    request: RequestState
    start: int
    stop: int
    session: object
    """The session of the engine that runs them."""

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.request.sequences[self.start : self.stop])


class OutputProcessor:
    """Requests by the caller's ids, and what is in flight of them by wire ids: the engine's ids,
    never used twice.

    generate(n=3)     "7-a1"    sequences [0, 3): one request, its outputs have an index
    after a loss      "7-0-b2"  sequence  [0, 1)
                      "7-2-c3"  sequence  [2, 3)   (the second had ended)

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._requests: dict[str, RequestState] = {}
        self._in_flight: dict[str, _SequenceRange] = {}
        self._numbers = itertools.count()
        self.observer: RequestObserver | None = None
        """Observes all requests from now on."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def get_in_flight(self, wire_id: str) -> RequestState | None:
        part = self._in_flight.get(wire_id)
        return None if part is None else part.request

    def get(self, request_id: str) -> RequestState | None:
        return self._requests.get(request_id)

    def new_request_id(self, request_id: str | None = None) -> str:
        """The id itself if no other request has it; None gives a number not given before.

        Raises:
            InvalidInput: it is in use, or not an id.
        """
        if request_id is None:
            return next(
                number for number in map(str, self._numbers) if number not in self._requests
            )
        if not isinstance(request_id, str) or not 0 < len(request_id) <= _MAX_REQUEST_ID_CHARS:
            raise InvalidInput(
                f"request_id is {request_id!r}, it must be a string of 1 to "
                f"{_MAX_REQUEST_ID_CHARS} characters"
            )
        if request_id in self._requests:
            raise InvalidInput(
                f"request_id {request_id!r} is that of an unfinished request; wait for its "
                "end, abort it, or use another one"
            )
        return request_id

    def add_request(self, request: RequestState) -> None:
        assert request.request_id not in self._requests, f"{request.request_id} was added twice"
        self._requests[request.request_id] = request
        request.observer = self.observer

    def remove_request(self, request: RequestState) -> list[str]:
        """Forget a request. Returns the wire ids under which the engine still runs some of it."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
            if request.end_trace is not None:
                request.end_trace()
        return self.withdraw(request)

    def withdraw(self, request: RequestState) -> list[str]:
        """It is in flight no more. Returns the wire ids that were."""
        return [wire_id for wire_id in request.wire_ids if self._in_flight.pop(wire_id, None)]

    def wire_requests(self, request: RequestState, session: object = None) -> list[EngineRequest]:
        """What `session` is to send for a request, now: all of it while nothing of it has come,
        afterwards each unfinished sequence by itself. Beams depend on each other: they start
        again."""
        request.wire_ids.clear()
        if request.is_beam_search or not request.has_started:
            messages = [self._wire_request(request, 0, len(request.sequences), session)]
        else:
            messages = [
                self._wire_request(request, index, index + 1, session)
                for index, sequence in enumerate(request.sequences)
                if not sequence.finished
            ]
        request.metrics.engine_request_id = request.wire_ids[0] if request.wire_ids else None
        return messages

    def _wire_request(
        self, request: RequestState, start: int, stop: int, session: object
    ) -> EngineRequest:
        # Random, so that it differs from ids of other clients and of earlier runs of this request.
        part = "" if stop - start == len(request.sequences) else f"-{start}"
        wire_id = f"{request.request_id}{part}-{secrets.token_hex(8)}"
        request.wire_ids.append(wire_id)
        self._in_flight[wire_id] = _SequenceRange(request, start, stop, session)
        return request.wire_request(start, stop, wire_id)

    def in_flight(self, session: object = None) -> list[RequestState]:
        """Each request of which an engine runs some, once: of all sessions, or of one."""
        parts = self._in_flight.values()
        return list(dict.fromkeys(p.request for p in parts if session in (None, p.session)))

    def drop_wire_ids(self, session: object = None) -> list[RequestState]:
        """Nothing of it is in flight any more. Returns each request that was, once."""
        requests = self.in_flight(session)
        for request in requests:
            self.withdraw(request)
        return requests

    def pop_rejected(self, wire_id: str, *, keep_resumed: bool) -> RequestState | None:
        """The request that the engine refused under this id; None if it was removed, or kept: with
        `keep_resumed` one that was interrupted goes on with the next engine."""
        part = self._in_flight.get(wire_id)
        if keep_resumed and part is not None and part.request.metrics.num_resumptions:
            return None
        self._in_flight.pop(wire_id, None)
        return None if part is None else part.request

    def process_outputs(
        self, outputs: EngineCoreOutputs, fingerprint: str | None = None
    ) -> list[Abort]:
        """Give each output to its sequence. Outputs of forgotten wire ids are dropped: they were
        sent before a request's abort arrived.

        Args:
            fingerprint: of the weights that made the tokens.

        Returns:
            What the engine continues after a stop string, or an error on this side.
        """
        now_s = self._now()
        stopped: dict[str, None] = {}
        failed: list[str] = []
        samples: list[tuple[str, int]] = []
        ends: dict[str, EngineCoreOutput] = {}
        if outputs.decoded is not None:
            weights = outputs.weights_version, fingerprint
            self._process_columns(outputs.decoded, weights, now_s, stopped, samples, failed)
        for output in outputs.other_outputs:
            part = self._in_flight.get(output.request_id)
            if part is None:
                continue
            if output.finish_reason is FinishReason.REFUSED:
                self._refuse(output)
                continue
            if output.finished:
                ends[output.request_id] = output
            if output.new_token_ids and part.request.weights_version != outputs.weights_version:
                part.request.note_weights(outputs.weights_version, fingerprint)
            try:
                must_abort = part.request.append_output(part.start + output.index, output, now_s)
                if must_abort:
                    samples.append((output.request_id, output.index))
                if (must_abort or output.finished) and part.finished:
                    stopped[output.request_id] = None
            except Exception as error:
                self._fail(part, error)
                failed.append(output.request_id)
        for wire_id in outputs.finished_req_ids:
            stopped.pop(wire_id, None)  # the engine has ended it, too
            part = self._in_flight.pop(wire_id, None)
            if part is not None:
                part.request.end_sequences(part.start, part.stop, ends.get(wire_id))
        failed = [wire_id for wire_id in failed if wire_id in self._in_flight]
        for wire_id in (*stopped, *failed):
            self._in_flight.pop(wire_id, None)
        kept = tuple(sample for sample in samples if sample[0] in self._in_flight)
        aborts = [Abort(request_ids=tuple(stopped), samples=kept, are_complete=True)]
        aborts.append(Abort(request_ids=tuple(failed)))
        return [each for each in aborts if each.request_ids or each.samples]

    def _process_columns(
        self,
        columns: DecodedTokens,
        weights: tuple[int, str | None],
        now_s: float,
        stopped: dict[str, None],
        samples: list[tuple[str, int]],
        failed: list[str],
    ) -> None:
        """One token for each of many sequences, without an object for each."""
        in_flight = self._in_flight
        token_ids = memoryview(columns.token_ids).cast("i").tolist()
        indexes = columns.indexes or itertools.repeat(0)
        before: dict[float, int] = {}
        """How many sequences had their last token at that time."""
        is_observed = self.observer is not None
        for wire_id, token_id, index in zip(columns.request_ids, token_ids, indexes, strict=False):
            part = in_flight.get(wire_id)
            if part is None:
                continue
            request = part.request
            if request.weights_version != weights[0]:
                request.note_weights(*weights)
            sequence = request.sequences[part.start + index]
            if is_observed:
                last_s = sequence.last_token_s
                before[last_s] = before.get(last_s, 0) + 1
            try:
                if request.append_token(sequence, token_id, now_s):
                    samples.append((wire_id, index))
                    if part.finished:
                        stopped[wire_id] = None
            except Exception as error:
                self._fail(part, error)
                failed.append(wire_id)
        if self.observer is not None:
            for before_s, count in before.items():
                if not math.isnan(before_s):  # resumed: its first token here
                    self.observer.on_tokens(now_s - before_s, count)

    def _refuse(self, output: EngineCoreOutput) -> None:
        """All of its request, behind what has come of it."""
        request = self._in_flight.pop(output.request_id).request
        why = output.detail or "the engine refused the request"
        request.fail(
            RequestRejected(why, request_id=request.request_id, code=ErrorCode.INVALID_REQUEST)
        )

    def _fail(self, part: _SequenceRange, error: Exception) -> None:
        """An error on this side ends one stream; the others continue."""
        if not part.request.finished:
            logger.exception("request %s cannot go on", part.request.request_id)
            part.request.fail(error)
