"""All requests of a client, each from its submission to its last output, and the way of the
engine's outputs to their sequences. Outputs are built when the consumer takes them: a slow consumer
gets several merged into one."""

import asyncio
import dataclasses
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from frontend.errors import InvalidInput
from frontend.event_loop import Clock
from frontend.outputs import FinishReasonName, RequestMetrics, RequestOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams
from frontend.sequence_state import SequenceState
from frontend.tokenizer import Tokenizer
from protocol.outputs import DecodedTokens, EngineCoreOutput, EngineCoreOutputs
from protocol.requests import EngineRequest
from protocol.sampling import sequence_seed

logger = logging.getLogger(__name__)

_MAX_REQUEST_ID_CHARS = 200
_MIN_TIMEOUT_S = 1e-3
"""Sent for a request whose time is over: the engine ends it at once, with the reason."""


class RequestObserver(Protocol):
    """Sees what a client's requests get, and when. Times in seconds."""

    def on_first_token(self, ttft_s: float) -> None:
        """Of a request, since it was submitted."""

    def on_tokens(self, itl_s: float, count: int) -> None:
        """So many sequences got tokens, each `itl_s` after its last ones."""

    def on_finished(self, request: "RequestState") -> None:
        """Its last sequence has ended. Not called for a request that its consumer left."""


class RequestState:
    """One user request: a prompt and `num_sequences` samples or beams of it.

    Args:
        request: what the engine is asked, under the user's id. It has a seed, so that a resumed
            request continues with the same random numbers.
        params: how text is made of the tokens.
        on_finished: called once, when the last sequence ends or an error ends them all.
    """

    def __init__(
        self,
        request: EngineRequest,
        params: SamplingParams,
        *,
        prompt_text: str | None,
        output_kind: RequestOutputKind,
        tokenizer: Tokenizer | None,
        clock: Clock,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.sequences = [
            SequenceState(index, request.prompt_token_ids, params, tokenizer)
            for index in range(request.num_sequences)
        ]
        self.wire_ids: list[str] = []
        """The engine's ids for it: one, or after a resumption one for each sequence."""
        self.metrics = RequestMetrics(arrival_time=time.time())
        self._request = request
        self._prompt_text = prompt_text
        self._kind = output_kind
        self._is_final_only = output_kind is RequestOutputKind.FINAL_ONLY
        self._last_token_s: float | None = None
        self._clock = clock
        self._submitted_s = clock.now()
        self.num_reports = 0
        """Errors of the engine since its last token."""
        self.weights_version: int | None = None
        """Of the last token."""
        self._weights_versions: list[int] = []
        self._num_cached_tokens: int | None = None
        self._error: Exception | None = None
        self._final_taken = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_finished = on_finished
        self.observer: RequestObserver | None = None

    @property
    def finished(self) -> bool:
        return self._error is not None or all(sequence.finished for sequence in self.sequences)

    @property
    def wire(self) -> EngineRequest:
        """What the engine was asked, under the user's id."""
        return self._request

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the engine found in its prefix cache; None before the first token."""
        return self._num_cached_tokens

    @property
    def is_beam_search(self) -> bool:
        return self._request.beam_search is not None

    @property
    def has_started(self) -> bool:
        """Whether the engine has sent any output of it."""
        return any(sequence.token_ids or sequence.finished for sequence in self.sequences)

    def wire_request(self, start: int, stop: int, wire_id: str) -> EngineRequest:
        """What to send for sequences `[start, stop)`, now: for a single one with all the tokens
        received so far, and with its own seed."""
        params = self._request.sampling_params
        if start > 0:
            assert params.seed is not None
            params = msgspec.structs.replace(params, seed=sequence_seed(params.seed, start))
        timeout_s = self._request.timeout_s
        if timeout_s is not None:
            timeout_s = max(_MIN_TIMEOUT_S, timeout_s - (self._clock.now() - self._submitted_s))
        return msgspec.structs.replace(
            self._request,
            request_id=wire_id,
            timeout_s=timeout_s,
            sampling_params=params,
            output_token_ids=self.sequences[start].token_ids if stop - start == 1 else [],
            num_sequences=stop - start,
            is_resumed=self.metrics.engine_request_id is not None,
        )

    def note_weights(self, version: int) -> None:
        """Its next tokens are of these weights, not of those before."""
        self.weights_version = version
        self._weights_versions.append(version)

    def append_output(self, index: int, output: EngineCoreOutput, now_s: float) -> bool:
        """Process one engine output for a sequence, received at `now_s` of the clock.

        Returns:
            True if a stop string ended the sequence while the engine continues it.
        """
        if output.new_token_ids:
            before_s = self._note_token(index, now_s)
            if self.observer is not None and not math.isnan(before_s):
                self.observer.on_tokens(now_s - before_s, 1)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if self.metrics.engine is None:
            self.metrics.engine = output.timings
        sequence = self.sequences[index]
        if sequence.finished:  # by a stop string, while the request's others go on
            return False
        must_abort = sequence.append_output(output)
        self._after_change()
        return must_abort

    def append_token(self, sequence: SequenceState, token_id: int, now_s: float) -> bool:
        """`append_output` for one token and nothing else."""
        self.num_reports = 0
        if self.metrics.first_token_s is None:  # it was resumed
            self._note_first_token(now_s)
        self._last_token_s = sequence.last_token_s = now_s
        if sequence.finish_reason is not None:
            return False
        if sequence.may_stop_at_text:
            must_abort = sequence.append_token(token_id)
            self._after_change()
            return must_abort
        sequence.token_ids.append(token_id)
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not self._is_final_only:
            waiter.set_result(None)
        return False

    def end_sequences(self, start: int, stop: int, last: EngineCoreOutput | None) -> None:
        """The engine has ended sequences `[start, stop)`: those without an end of their own get
        that of the request's last output."""
        reason = None if last is None else last.finish_reason
        detail = None if last is None else last.detail
        for sequence in self.sequences[start:stop]:
            if not sequence.finished:
                sequence.finish(
                    "error" if reason is None else reason.value,
                    detail or "the engine ended the request",
                )
                self._after_change()

    def finish(self, reason: FinishReasonName, detail: str | None = None) -> None:
        """End every sequence that still runs; the stream gets a last output."""
        if not self.finished:
            for sequence in self.sequences:
                sequence.finish(reason, detail)
            self._after_change()

    def fail(self, error: Exception) -> None:
        """End the stream with an exception, after what has arrived."""
        if not self.finished:
            self._error = error
            self._after_change()

    async def next_output(self) -> RequestOutput:
        """The next output, as soon as there is something new.

        Raises:
            EngineClientError: what `fail` was given.
        """
        assert not self._final_taken, f"request {self.request_id} has ended"
        while not self._has_output():
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take_output()

    def failed_output(self, detail: str) -> RequestOutput:
        """The output of a request that failed: what it has so far, with reason "error"."""
        for sequence in self.sequences:
            sequence.finish("error", detail)
        return self._take_output()

    def _has_output(self) -> bool:
        if self._is_final_only:
            return self._error is None and self.finished
        if len(self.sequences) == 1:
            return self.sequences[0].has_new_output
        return any(sequence.has_new_output for sequence in self.sequences)

    def _take_output(self) -> RequestOutput:
        delta = self._kind is RequestOutputKind.DELTA
        self._note_times()
        if len(self.sequences) == 1:
            sequence = self.sequences[0]
            finished = sequence.finish_reason is not None
            outputs = [sequence.take_output(delta=delta)]
        else:
            finished = all(sequence.finished for sequence in self.sequences)
            outputs = [
                sequence.take_output(delta=delta)
                for sequence in self.sequences
                if not delta or sequence.has_new_output
            ]
        self._final_taken = finished
        return RequestOutput(  # one a token: names cost half a microsecond
            self.request_id,
            self._prompt_text,
            self._request.prompt_token_ids,
            outputs,
            finished,
            self.metrics,
            self._num_cached_tokens,
            self._weights_versions.copy(),
        )

    def _note_token(self, index: int, now_s: float) -> float:
        """Returns when the sequence's last token had come; NaN before its first."""
        self.num_reports = 0
        if self.metrics.first_token_s is None:
            self._note_first_token(now_s)
        sequence = self.sequences[index]
        before_s, sequence.last_token_s = sequence.last_token_s, now_s
        self._last_token_s = now_s
        return before_s

    def _note_first_token(self, now_s: float) -> None:
        ttft_s = self.metrics.first_token_s = now_s - self._submitted_s
        if self.observer is not None:
            self.observer.on_first_token(ttft_s)

    def _note_times(self) -> None:
        """What is the same for many tokens is noted when somebody looks."""
        if self._last_token_s is not None:
            self.metrics.last_token_s = self._last_token_s - self._submitted_s

    def _after_change(self) -> None:
        if self.finished:
            self._note_times()
            self.metrics.finished_s = self._clock.now() - self._submitted_s
            if self.observer is not None and self._error is None:
                self.observer.on_finished(self)
                self.observer = None
            if self._on_finished is not None:
                self._on_finished()
                self._on_finished = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclasses.dataclass(frozen=True, slots=True)
class _SequenceRange:
    """Sequences `[start, stop)` of a request; the engine counts them from 0."""

    request: RequestState
    start: int
    stop: int
    session: object
    """Of the engine that runs them."""

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.request.sequences[self.start : self.stop])


class OutputProcessor:
    """Requests by the caller's ids, and what is in flight of them by wire ids: the engine's ids,
    never used twice.

    generate(n=3)     "7-a1"    sequences [0, 3): one request, its outputs have an index
    after a loss      "7-0-b2"  sequence  [0, 1)
                      "7-2-c3"  sequence  [2, 3)   (the second had ended)
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self._in_flight: dict[str, _SequenceRange] = {}
        self._numbers = itertools.count()
        self.observer: RequestObserver | None = None
        """Of all requests from now on."""

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
        self, outputs: EngineCoreOutputs
    ) -> tuple[list[str], list[tuple[str, int]]]:
        """Give each output to its sequence. Outputs of forgotten wire ids are dropped: they were
        sent before a request's abort arrived.

        Returns:
            What the engine continues after a stop string: wire ids none of whose sequences goes on,
            and (wire id, index) of single sequences of others.
        """
        now_s = self._clock.now()
        stopped: dict[str, None] = {}
        samples: list[tuple[str, int]] = []
        ends: dict[str, EngineCoreOutput] = {}
        if outputs.decoded is not None:
            self._process_columns(outputs.decoded, outputs.weights_version, now_s, stopped, samples)
        for output in outputs.other_outputs:
            part = self._in_flight.get(output.request_id)
            if part is None:
                continue
            if output.finished:
                ends[output.request_id] = output
            if output.new_token_ids and part.request.weights_version != outputs.weights_version:
                part.request.note_weights(outputs.weights_version)
            try:
                must_abort = part.request.append_output(part.start + output.index, output, now_s)
                if must_abort:
                    samples.append((output.request_id, output.index))
                if (must_abort or output.finished) and part.finished:
                    stopped[output.request_id] = None
            except Exception as error:
                self._fail(output.request_id, part, error, stopped)
        for wire_id in outputs.finished_req_ids:
            stopped.pop(wire_id, None)  # the engine has ended it, too
            part = self._in_flight.pop(wire_id, None)
            if part is not None:
                part.request.end_sequences(part.start, part.stop, ends.get(wire_id))
        for wire_id in stopped:
            self._in_flight.pop(wire_id, None)
        return list(stopped), [sample for sample in samples if sample[0] in self._in_flight]

    def _process_columns(
        self,
        columns: DecodedTokens,
        weights_version: int,
        now_s: float,
        stopped: dict[str, None],
        samples: list[tuple[str, int]],
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
            if request.weights_version != weights_version:
                request.note_weights(weights_version)
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
                self._fail(wire_id, part, error, stopped)
        if self.observer is not None:
            for before_s, count in before.items():
                if not math.isnan(before_s):  # resumed: its first token here
                    self.observer.on_tokens(now_s - before_s, count)

    def _fail(
        self, wire_id: str, part: _SequenceRange, error: Exception, stopped: dict[str, None]
    ) -> None:
        """An error on this side ends one stream; the others continue."""
        if not part.request.finished:
            logger.exception("request %s cannot go on", part.request.request_id)
            part.request.fail(error)
        stopped[wire_id] = None
