"""A request from its submission to its last output, as its consumer waits for it. Outputs are built
when the consumer takes them: a slow consumer gets several merged into one."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from frontend.event_loop import Clock
from frontend.outputs import FinishReasonName, RequestMetrics, RequestOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams
from frontend.sequence_state import SequenceState
from frontend.tokenizer import Tokenizer
from protocol.outputs import EngineCoreOutput
from protocol.requests import EngineRequest
from protocol.sampling import sequence_seed


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
        self._clock = clock
        self._submitted_s = clock.now()
        self._num_cached_tokens: int | None = None
        self._error: Exception | None = None
        self._final_taken = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_finished = on_finished

    @property
    def finished(self) -> bool:
        return self._error is not None or all(sequence.finished for sequence in self.sequences)

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
        return msgspec.structs.replace(
            self._request,
            request_id=wire_id,
            sampling_params=params,
            output_token_ids=self.sequences[start].token_ids if stop - start == 1 else [],
            num_sequences=stop - start,
        )

    def append_output(self, index: int, output: EngineCoreOutput, now_s: float) -> bool:
        """Process one engine output for a sequence, received at `now_s` of the clock.

        Returns:
            True if a stop string ended the sequence while the engine continues it.
        """
        if output.new_token_ids:
            self._note_token(now_s)
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

    def append_token(self, index: int, token_id: int, now_s: float) -> bool:
        """`append_output` for one token and nothing else."""
        self._note_token(now_s)
        sequence = self.sequences[index]
        if sequence.finished:
            return False
        must_abort = sequence.append_token(token_id)
        self._after_change()
        return must_abort

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
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self._error is None and self.finished
        return any(sequence.has_new_output for sequence in self.sequences)

    def _take_output(self) -> RequestOutput:
        delta = self._kind is RequestOutputKind.DELTA
        finished = all(sequence.finished for sequence in self.sequences)
        self._final_taken = finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=[
                sequence.take_output(delta=delta)
                for sequence in self.sequences
                if not delta or sequence.has_new_output
            ],
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _note_token(self, now_s: float) -> None:
        since_s = now_s - self._submitted_s
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = since_s
        self.metrics.last_token_s = since_s

    def _after_change(self) -> None:
        if self.finished:
            self.metrics.finished_s = self._clock.now() - self._submitted_s
            if self._on_finished is not None:
                self._on_finished()
                self._on_finished = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
