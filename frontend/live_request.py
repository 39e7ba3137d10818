"""A request from its submission to its terminal output, as its consumer waits for it.

Owns the sequences of one request and the consumer's wake-up. Outputs are built when the consumer
takes them, so a slow consumer finds several merged and nothing piles up. Must not know sockets.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable

import msgspec

from frontend.output_processor import SequenceProcessor
from frontend.outputs import FinishReasonName, RequestMetrics, RequestOutput
from frontend.prompts import Prompt
from frontend.sampling_params import RequestOutputKind, SamplingParams
from frontend.tokenizer import Tokenizer
from protocol.outputs import EngineCoreOutput
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams, sequence_seed


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What the engine's policy looks at when it decides whose turn it is."""

    priority: int = 0
    """Smaller is more urgent; only under policy priority."""
    tenant: str | None = None
    """Whose service policy fair counts; None: this client's own."""


FIRST_COME = Turn()
"""Nobody in particular, in no hurry."""


class LiveRequest:
    """One user request: a prompt and `num_sequences` samples or beams of it.

    Args:
        seed: of the first sequence; each next one has the next. Drawn on this side, so that a
            resumed request goes on with the same random numbers.
        beam_search: the sequences are beams, `beam_width` of them; else they are `params.n`
            samples.
        on_finished: called once, when the last sequence ends or an error ends them all.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        seed: int,
        turn: Turn = FIRST_COME,
        beam_search: BeamSearchParams | None = None,
        on_finished: Callable[["LiveRequest"], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.sequences = [
            SequenceProcessor(index, prompt.token_ids, params, tokenizer)
            for index in range(params.n if beam_search is None else beam_search.beam_width)
        ]
        self.wire_ids: list[str] = []
        """The ids that the engine knows it by: one, or after a resumption one a sequence."""
        self.metrics = RequestMetrics(arrival_time=time.time())
        self._prompt = prompt
        self._turn = turn
        self._beam_search = beam_search
        self._seed = seed
        self._wire_params = params.to_wire(len(prompt.token_ids), max_model_len, seed=seed)
        self._kind = params.output_kind
        self._submitted_s = time.monotonic()
        self._num_cached_tokens: int | None = None
        self._error: Exception | None = None
        self._final_taken = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_finished = on_finished

    @property
    def finished(self) -> bool:
        return self._error is not None or all(sequence.finished for sequence in self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt.token_ids)

    @property
    def is_beam_search(self) -> bool:
        return self._beam_search is not None

    @property
    def has_started(self) -> bool:
        """Whether anything of it has come."""
        return any(sequence.token_ids or sequence.finished for sequence in self.sequences)

    def wire_request(self, start: int, stop: int, wire_id: str) -> EngineRequest:
        """What to send for sequences `[start, stop)`, now: for a single one with all the tokens
        received so far, and with its own seed."""
        params = self._wire_params
        if start > 0:
            params = msgspec.structs.replace(params, seed=sequence_seed(self._seed, start))
        return EngineRequest(
            request_id=wire_id,
            prompt_token_ids=self._prompt.token_ids,
            sampling_params=params,
            output_token_ids=self.sequences[start].token_ids if stop - start == 1 else [],
            num_sequences=stop - start,
            beam_search=self._beam_search,
            priority=self._turn.priority,
            tenant=self._turn.tenant,
            cache_salt=self._prompt.cache_salt,
        )

    def append(self, index: int, output: EngineCoreOutput, now_s: float) -> bool:
        """Take in one engine output, at `now_s` of the monotonic clock. True: a stop string ended
        the sequence, and the engine goes on with it."""
        if output.new_token_ids:
            self._note_token(now_s)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if self.metrics.engine is None:
            self.metrics.engine = output.timings
        sequence = self.sequences[index]
        if sequence.finished:  # by a stop string, while the request's others go on
            return False
        must_tell = sequence.append(output)
        self._after_change()
        return must_tell

    def append_token(self, index: int, token_id: int, now_s: float) -> bool:
        """`append` for one token with nothing else to say."""
        self._note_token(now_s)
        sequence = self.sequences[index]
        if sequence.finished:
            return False
        must_tell = sequence.append_token(token_id)
        self._after_change()
        return must_tell

    def end_sequences(self, start: int, stop: int, last: EngineCoreOutput | None) -> None:
        """The engine is through with sequences `[start, stop)`: those without an end of their own
        get that of the request's last output."""
        reason = None if last is None else last.finish_reason
        detail = None if last is None else last.detail
        for sequence in self.sequences[start:stop]:
            if not sequence.finished:
                sequence.end(
                    "error" if reason is None else reason.value,
                    detail or "the engine ended the request",
                )
                self._after_change()

    def end(self, reason: FinishReasonName, detail: str | None = None) -> None:
        """End every sequence that still runs; its stream gets a last output."""
        if not self.finished:
            for sequence in self.sequences:
                sequence.end(reason, detail)
            self._after_change()

    def fail(self, error: Exception) -> None:
        """End the stream with an exception, behind what has arrived."""
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
        return self._take()

    def failed_output(self, detail: str) -> RequestOutput:
        """The output of a request that failed: what it has so far, with reason "error"."""
        for sequence in self.sequences:
            sequence.end("error", detail)
        return self._take()

    def _has_output(self) -> bool:
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self._error is None and self.finished
        return any(sequence.has_news for sequence in self.sequences)

    def _take(self) -> RequestOutput:
        delta = self._kind is RequestOutputKind.DELTA
        finished = all(sequence.finished for sequence in self.sequences)
        self._final_taken = finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[
                sequence.take(delta=delta)
                for sequence in self.sequences
                if not delta or sequence.has_news
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
            self.metrics.finished_s = time.monotonic() - self._submitted_s
            if self._on_finished is not None:
                self._on_finished(self)
                self._on_finished = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
