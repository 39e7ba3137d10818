"""A request from its submission to its terminal output, as its consumer waits for it.

Owns the sequences of one request and the consumer's wake-up. Outputs are built when the consumer
takes them, so a slow consumer finds several merged and nothing piles up. Must not know sockets.
"""

import asyncio
import time
from collections.abc import Callable

from frontend.output_processor import SequenceProcessor
from frontend.outputs import FinishReasonName, RequestMetrics, RequestOutput
from frontend.prompts import Prompt
from frontend.sampling_params import RequestOutputKind, SamplingParams
from frontend.tokenizer import Tokenizer
from protocol.outputs import EngineCoreOutput
from protocol.requests import EngineRequest
from protocol.sampling import MAX_SEED


class LiveRequest:
    """One user request: `n` sequences, each a request of its own to the engine.

    Args:
        seed: of the first sequence; each next one has the next. Drawn on this side, so that a
            resumed request goes on with the same random numbers.
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
        priority: int = 0,
        on_finished: Callable[["LiveRequest"], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.sequences = [
            SequenceProcessor(index, prompt.token_ids, params, tokenizer)
            for index in range(params.n)
        ]
        self.wire_ids = [""] * params.n
        self.metrics = RequestMetrics(arrival_time=time.time())
        self._prompt = prompt
        self._priority = priority
        self._wire_params = [
            params.to_wire(len(prompt.token_ids), max_model_len, seed=(seed + index) & MAX_SEED)
            for index in range(params.n)
        ]
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

    def wire_request(self, index: int, wire_id: str) -> EngineRequest:
        """What to send for one sequence, now: with all the tokens received so far."""
        return EngineRequest(
            request_id=wire_id,
            prompt_token_ids=self._prompt.token_ids,
            sampling_params=self._wire_params[index],
            output_token_ids=self.sequences[index].token_ids,
            priority=self._priority,
            cache_salt=self._prompt.cache_salt,
        )

    def append(self, index: int, output: EngineCoreOutput) -> bool:
        """Take in one engine output. True: the engine must be told to stop this sequence."""
        now_s = time.monotonic() - self._submitted_s
        if output.new_token_ids:
            if self.metrics.first_token_s is None:
                self.metrics.first_token_s = now_s
            self.metrics.last_token_s = now_s
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if self.metrics.engine is None:
            self.metrics.engine = output.timings
        must_tell = self.sequences[index].append(output)
        self._after_change()
        return must_tell

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

    def _after_change(self) -> None:
        if self.finished:
            self.metrics.finished_s = time.monotonic() - self._submitted_s
            if self._on_finished is not None:
                self._on_finished(self)
                self._on_finished = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
