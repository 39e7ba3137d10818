"""One sequence of a request: from engine outputs to text, stop strings and logprobs."""

import math
import struct
from collections.abc import Sequence

from frontend.logprobs import SampleLogprobs
from frontend.outputs import MAX_MODEL_LEN, CompletionOutput, FinishReasonName
from frontend.sampling_params import SamplingParams
from frontend.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import EngineCoreOutput, FinishReason, Logprobs

_FLOAT = struct.Struct("<f")


class SequenceState:
    """Everything received for one sequence. An interrupted request is resumed from `token_ids`, so
    they are exactly what the engine sent, up to a stop string."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.last_token_s = math.nan
        """When its last token came, on the client's clock."""
        self.finish_reason: FinishReasonName | None = None
        self._stop_reason: int | str | None = None
        self._detail: str | None = None
        self._tokenizer = tokenizer
        self._min_tokens = params.min_tokens
        self._most = math.inf if params.max_tokens is None else params.max_tokens
        self._shows_stop_token = params.include_stop_str_in_output
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._matcher: StopStringMatcher | None = None
        self.may_stop_at_text = bool(params.stop_strings)
        if stop := params.stop_strings:
            self._matcher = StopStringMatcher(stop, include_in_output=self._shows_stop_token)
        self._has_ranks = not params.logprob_token_ids
        """Whether the reported tokens beside the sampled one have ranks."""
        is_reported = params.logprobs is not None or not self._has_ranks
        self._logprobs: list[Logprobs] | None = [] if is_reported else None
        """Log-probabilities of one token each; those that a delta has had are dropped."""
        self._cumulative_logprob = 0.0 if is_reported else None
        self._num_decoded_tokens = 0
        """Text is made of the tokens behind these when it is taken, unless it may end with them."""
        # the whole text is _taken_text + the parts, which no output has had yet
        self._taken_text = ""
        self._parts: list[str] = []
        self._num_taken_tokens = 0
        self._end_taken = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_new_output(self) -> bool:
        return (
            len(self.token_ids) > self._num_taken_tokens
            or bool(self._parts)
            or (self.finished and not self._end_taken)
        )

    def append_output(self, output: EngineCoreOutput) -> bool:
        """Process one engine output.

        Returns:
            True if a stop string ended the sequence while the engine continues it: then the
            engine must abort it.
        """
        assert not self.finished, f"output for finished sequence {self.index}"
        before = len(self.token_ids)
        hides_last = output.finish_reason is FinishReason.STOP and not self._shows_stop_token
        stop_string = None
        if output.new_token_ids:
            stop_string = self._append_tokens(output.new_token_ids, hides_last=hides_last)
        if output.logprobs is not None and self._logprobs is not None:
            self._append_logprobs(output.logprobs, len(self.token_ids) - before)
        if output.cumulative_logprob is not None:
            self._cumulative_logprob = output.cumulative_logprob
        if stop_string is None and output.finished:
            stop_string = self._flush()
        if stop_string is not None:
            self.finish_reason, self._stop_reason = "stop", stop_string
            return not output.finished
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self._stop_reason = output.stop_reason
            if output.finish_reason is FinishReason.LENGTH and len(self.token_ids) < self._most:
                self._stop_reason = MAX_MODEL_LEN
            self._detail = output.detail
        return False

    def append_token(self, token_id: int) -> bool:
        """Process one token of a sequence that continues.

        Returns:
            True if a stop string ended the sequence: then the engine must abort it.
        """
        assert not self.finished, f"token for finished sequence {self.index}"
        stop_string = self._append_tokens((token_id,), hides_last=False)
        if stop_string is None:
            return False
        self.finish_reason, self._stop_reason = "stop", stop_string
        return True

    def finish(self, reason: FinishReasonName, detail: str | None = None) -> None:
        """End it from this side. Text that was withheld is released."""
        if not self.finished:
            self._flush()
            self.finish_reason, self._detail = reason, detail

    def take_output(self, *, delta: bool) -> CompletionOutput:
        """All there is, or with `delta` what is new since the last call."""
        token_ids, num_decoded = self.token_ids, self._num_decoded_tokens
        num_tokens = len(token_ids)
        taken = token_ids[num_decoded:]
        new_text = ""
        if taken:
            self._num_decoded_tokens = num_tokens
            if self._detokenizer is not None:
                new_text = self._detokenizer.append(taken)
        if self._parts:
            new_text = "".join((*self._parts, new_text))
            self._parts.clear()
        start = self._num_taken_tokens if delta else 0
        if start != num_decoded:
            taken = token_ids[start:]
        self._num_taken_tokens = num_tokens
        if self.finish_reason is not None:
            self._end_taken = True
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._take_logprobs(self._logprobs, delta=delta)
        if not delta:
            new_text = self._taken_text = self._taken_text + new_text
        return CompletionOutput(  # one a token: names cost half a microsecond
            self.index,
            new_text,
            taken,
            self._cumulative_logprob,
            logprobs,
            self.finish_reason,
            self._stop_reason,
            self._detail,
        )

    def _decode_appended(self) -> None:
        """Text of the tokens that were appended without it."""
        if self._detokenizer is not None:
            self._emit(self._detokenizer.append(self.token_ids[self._num_decoded_tokens :]))
        self._num_decoded_tokens = len(self.token_ids)

    def _append_tokens(self, token_ids: Sequence[int], *, hides_last: bool) -> str | None:
        if self._num_decoded_tokens < len(self.token_ids):
            self._decode_appended()
        num_shown = len(token_ids) - 1 if hides_last and token_ids else len(token_ids)
        stop_string = None
        if self._detokenizer is None or self._matcher is None:
            self.token_ids += token_ids
            if num_shown and self._detokenizer is not None:
                self._emit(self._detokenizer.append(token_ids[:num_shown]))
        else:
            # One by one, to drop the tokens behind the one that completes a stop string.
            for position, token_id in enumerate(token_ids):
                self.token_ids.append(token_id)
                if position < num_shown:
                    stop_string = self._append_text(self._detokenizer.append([token_id]))
                    if stop_string is not None:
                        break
        self._num_decoded_tokens = len(self.token_ids)
        return stop_string

    def _append_text(self, text: str) -> str | None:
        if self._matcher is None:
            self._emit(text)
            return None
        may_stop = len(self.token_ids) > self._min_tokens
        shown, stop_string = self._matcher.append(text, may_stop=may_stop)
        self._emit(shown)
        return stop_string

    def _flush(self) -> str | None:
        """Release withheld text. Returns the stop string that this completed, if any."""
        if self._num_decoded_tokens < len(self.token_ids):
            self._decode_appended()
        if self._detokenizer is None:
            return None
        stop_string = self._append_text(self._detokenizer.flush())
        if stop_string is None and self._matcher is not None:
            self._emit(self._matcher.flush())
        return stop_string

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _append_logprobs(self, columns: Logprobs, num_kept: int) -> None:
        assert self._logprobs is not None
        for place in range(min(num_kept, columns.num_positions)):
            self._logprobs.append(columns.part(place, place + 1))
            (sampled,) = _FLOAT.unpack_from(columns.logprobs, place * columns.width * _FLOAT.size)
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + sampled

    def _take_logprobs(self, columns: list[Logprobs], *, delta: bool) -> SampleLogprobs:
        taken = [*columns]
        if delta:
            columns.clear()
        return SampleLogprobs(taken, self._tokenizer, has_ranks=self._has_ranks)
