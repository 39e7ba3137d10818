"""One request of a client, from its submission to its last output. Outputs are built when the
consumer takes them: a slow consumer gets several merged into one."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Protocol

import msgspec

from frontend.logprobs import PromptReport
from frontend.outputs import FinishReasonName, RequestMetrics, RequestOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams
from frontend.sequence_state import SequenceState
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import EngineCoreOutput
from protocol.pooling import Pooled
from protocol.requests import EngineRequest
from protocol.sampling import sequence_seed

_MIN_TIMEOUT_S = 1e-3
"""Sent for a request whose time is over: the engine ends it at once, with the reason."""


current_tracer: ContextVar[Callable[["RequestState"], Callable[[], None]] | None] = ContextVar(
    "current_tracer", default=None
)
"""Called with each request made in this context. Calls what it returns when the request is over, or
its consumer left."""


class RequestObserver(Protocol):
    """Sees what a client's requests get, and when. Times in seconds."""

    def on_first_token(self, ttft_s: float) -> None:
        """Note a request's first token, and how long after its submission it came."""

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
        now: monotonic seconds.
        on_finished: called once, when the last sequence ends or an error ends them all.
        frames: what TensorRefs of `request` point at; kept until it is over, to be sent again.
    """

    def __init__(
        self,
        request: EngineRequest,
        params: SamplingParams,
        *,
        prompt_text: str | None,
        output_kind: RequestOutputKind,
        tokenizer: Tokenizer | None,
        now: Callable[[], float],
        on_finished: Callable[[], None] | None = None,
        frames: Sequence[bytes | memoryview] = (),
    ) -> None:
        self.frames = frames
        self.request_id = request.request_id
        self.sequences = [
            SequenceState(index, request.prompt_token_ids, params, tokenizer)
            for index in range(request.num_sequences)
        ]
        self.wire_ids: list[str] = []
        """The engine's ids for it: one, or after a resumption one for each sequence."""
        self.metrics = RequestMetrics(arrival_time=time.time())
        self.wire = request
        """The request as the engine was asked it, under the user's id."""
        self.prompt_text = prompt_text
        self._kind = output_kind
        self._is_final_only = output_kind is RequestOutputKind.FINAL_ONLY
        self._last_token_s: float | None = None
        self._now = now
        self._submitted_s = now()
        self.adapter_fingerprint: str | None = None
        """The adapter's fingerprint when the request was sent."""
        self.weights_fingerprint: str | None = None
        """The fingerprint of its last token's weights, by one of several engines."""
        self.kv_source: str | None = None
        """The address at which an engine can get blocks of its prompt."""
        self.session_id: str | None = None
        """Requests with the same one should go to the same one of several engines."""
        self.num_reports = 0
        """Errors of the engine since its last token."""
        self.weights_version: int | None = None
        """The version of the last token's weights."""
        self._weights_versions: list[int] = []
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the engine found in its prefix cache; None before the first token."""
        self._prompt_report = PromptReport.of(request, tokenizer)
        self._pooled: Pooled | None = None
        self.error: Exception | None = None
        """The error that ended its stream, if `fail` did."""
        self._final_taken = False
        self._has_output = False
        """Whether `next_output` has something to return."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_finished = on_finished
        self.observer: RequestObserver | None = None
        tracer = current_tracer.get()
        self.end_trace = None if tracer is None else tracer(self)

    @property
    def finished(self) -> bool:
        return self.error is not None or all(sequence.finished for sequence in self.sequences)

    @property
    def is_beam_search(self) -> bool:
        return self.wire.beam_search is not None

    @property
    def has_started(self) -> bool:
        """Whether the engine has sent any output of it."""
        return any(sequence.token_ids or sequence.finished for sequence in self.sequences)

    def wire_request(self, start: int, stop: int, wire_id: str) -> EngineRequest:
        """What to send for sequences `[start, stop)`, now: for a single one with all the tokens
        received so far, and with its own seed."""
        params = self.wire.sampling_params
        if start > 0:
            assert params.seed is not None
            params = msgspec.structs.replace(params, seed=sequence_seed(params.seed, start))
        if self._prompt_report is not None:
            params = self._prompt_report.asked_again(params)
        timeout_s = self.wire.timeout_s
        if timeout_s is not None:
            timeout_s = max(_MIN_TIMEOUT_S, timeout_s - (self._now() - self._submitted_s))
        has_started = self.has_started
        return msgspec.structs.replace(
            self.wire,
            request_id=wire_id,
            timeout_s=timeout_s,
            sampling_params=params,
            output_token_ids=self.sequences[start].token_ids if stop - start == 1 else [],
            num_sequences=stop - start,
            is_resumed=self.metrics.engine_request_id is not None,
            kv_source=self.kv_source,
            adapter_fingerprint=self.adapter_fingerprint if has_started else None,
            weights_fingerprint=self.weights_fingerprint if has_started else None,
        )

    def note_weights(self, version: int, fingerprint: str | None = None) -> None:
        """Its next tokens are of these weights, not of those before."""
        self.weights_version, self.weights_fingerprint = version, fingerprint
        self._weights_versions = [*self._weights_versions, version]  # outputs share the list

    def append_output(self, index: int, output: EngineCoreOutput, now_s: float) -> bool:
        """Process one engine output for a sequence, received at `now_s`.

        Returns:
            True if a stop string ended the sequence while the engine continues it.
        """
        if self._prompt_report is not None:
            self._prompt_report.append(output)
        if output.new_token_ids:
            before_s = self._note_token(index, now_s)
            if self.observer is not None and not math.isnan(before_s):
                self.observer.on_tokens(now_s - before_s, 1)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        self._pooled = output.pooled
        self.metrics.add(output)
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
        if not (self._has_output or self._is_final_only):
            self._has_output = True
            self._wake()
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
            self.error = error
            self._after_change()

    async def next_output(self) -> RequestOutput:
        """The next output, as soon as there is something new.

        Raises:
            EngineClientError: what `fail` was given.
        """
        assert not self._final_taken, f"request {self.request_id} has ended"
        while not self._has_output:
            if self.error is not None:
                raise self.error
            if self._loop is None:
                self._loop = asyncio.get_running_loop()  # asks the system for this process's id
            self._waiter = self._loop.create_future()
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

    def _take_output(self) -> RequestOutput:
        delta = self._kind is RequestOutputKind.DELTA
        self._has_output = False
        if self._last_token_s is not None:  # the same for many tokens: noted when somebody looks
            self.metrics.last_token_s = self._last_token_s - self._submitted_s
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
            self.prompt_text,
            self.wire.prompt_token_ids,
            outputs,
            finished,
            self.metrics,
            self.num_cached_tokens,
            self._weights_versions,
            self._pooled,
            None if self._prompt_report is None else self._prompt_report.take(delta=delta),
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
        if self._prompt_report is not None:
            self._prompt_report.complete()
        ttft_s = self.metrics.first_token_s = now_s - self._submitted_s
        if self.observer is not None:
            self.observer.on_first_token(ttft_s)

    def _after_change(self) -> None:
        if finished := self.finished:
            if self._last_token_s is not None:
                self.metrics.last_token_s = self._last_token_s - self._submitted_s
            self.metrics.finished_s = self._now() - self._submitted_s
            if self.observer is not None and self.error is None:
                self.observer.on_finished(self)
                self.observer = None
            if self._on_finished is not None:
                self._on_finished()
                self._on_finished = None
        if self._is_final_only:
            self._has_output = self.error is None and finished
        else:
            self._has_output = any(sequence.has_new_output for sequence in self.sequences)
        if self._has_output or self.error is not None:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
