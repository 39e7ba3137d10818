"""Results of a generation: plain records with vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from frontend.logprobs import Logprob, PromptLogprobs
from protocol.outputs import EngineCoreOutput, RequestTimings
from protocol.pooling import Pooled

if TYPE_CHECKING:
    from frontend.sampling_params import SamplingParams
    from frontend.text.tokenizer import Tokenizer

FinishReasonName = Literal["stop", "length", "repetition", "abort", "error", "timeout", "refused"]
MAX_MODEL_LEN = "max_model_len"


class CompletionOutput(msgspec.Struct):
    """One sequence of a request, whole or what is new of it (`RequestOutputKind`).

    `token_ids` include the token that ended the sequence; `text` does not, and ends before a stop
    string unless `include_stop_str_in_output`. `stop_reason` is the stop string or stop token id
    that ended it, None for end-of-sequence, and `MAX_MODEL_LEN` where the model's length ended it
    before `max_tokens`. `logprobs` has one entry a token: the sampled token first, then the
    likeliest. `detail` says in words what the reason alone does not."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None
    detail: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Durations in seconds, as this client saw them since the request was submitted.

    `arrival_time` is seconds since the epoch. `engine` is what the engine measured, None before the
    end; of a resumed request that of the sequence that ended first."""

    arrival_time: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_resumptions: int = 0
    """How often the request was resumed after the engine had been lost."""
    engine: RequestTimings | None = None
    num_draft_tokens: int = 0
    """Drafts that the engine verified; known at the end."""
    num_accepted_tokens: int = 0
    """Drafts that became tokens of the output."""
    engine_request_id: str | None = None
    """The engine's id of the request (`engine-client info --request`); after a resumption that of
    its first resumed sequence."""

    def add(self, output: EngineCoreOutput) -> None:
        """Note what one of the engine's outputs says."""
        if self.engine is None:
            self.engine = output.timings
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += output.num_accepted_tokens


class RequestOutput(msgspec.Struct):
    """A request's outputs, in order of their index. `finished` is True once, at the end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache."""
    weights_versions: list[int] = []
    """Of the weights that made the tokens so far, in order: more than one if they were updated
    meanwhile. Of beams only the last."""
    pooled: Pooled | None = None
    """The result of a pooling request, which has no text."""
    prompt_logprobs: PromptLogprobs | None = None
    """If asked for, once the prompt is computed: one entry a token, None for the first. In a stream
    of deltas in one output only."""


def best_of(output: RequestOutput, params: "SamplingParams") -> RequestOutput:
    """The last output with the `n` of its `best_of` samples whose tokens have the largest sum of
    log-probabilities, best first; samples that failed are the last."""

    def worth(sample: CompletionOutput) -> tuple[bool, float]:
        return sample.finish_reason != "error", sample.cumulative_logprob or 0.0

    if params.num_sequences == params.n:
        return output
    best = sorted(output.outputs, key=worth, reverse=True)[: params.n]
    numbered = [msgspec.structs.replace(each, index=place) for place, each in enumerate(best)]
    return msgspec.structs.replace(output, outputs=numbered)


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. As with vLLM, `tokens` and `text` begin with the prompt's."""

    tokens: list[int]
    text: str
    cum_logprob: float
    num_prompt_tokens: int
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams, best first; none if the request failed, and `detail` says why."""

    sequences: list[BeamSearchSequence]
    request_id: str
    detail: str | None = None


def beam_search_output(output: RequestOutput, tokenizer: "Tokenizer | None") -> BeamSearchOutput:
    """From a finished request. Text needs a tokenizer; without one it is empty."""
    sequences = []
    detail = None
    for beam in output.outputs:
        if beam.finish_reason in ("error", "abort", "timeout") or beam.cumulative_logprob is None:
            detail = detail or beam.detail
            continue
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                text="" if tokenizer is None else tokenizer.decode(tokens),
                cum_logprob=beam.cumulative_logprob,
                num_prompt_tokens=len(output.prompt_token_ids),
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
        )
    return BeamSearchOutput(sequences, output.request_id, None if sequences else detail)
