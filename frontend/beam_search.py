"""Beam search as a caller sees it: vLLM's names for parameters and results.

The search itself runs in the engine. Must not know requests or sockets.
"""

import dataclasses
from typing import Literal

import protocol.sampling
from frontend.errors import InvalidInput
from frontend.outputs import FinishReasonName, RequestOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams
from frontend.tokenizer import Tokenizer
from protocol.errors import InvalidParameter


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Results are those of transformers' `generate(num_beams=beam_width, do_sample=False)`.

    A finished beam's score is its cumulative log-probability / length ** length_penalty, where
    length counts generated tokens. `early_stopping` True stops at beam_width finished beams; False
    when no running beam can still become better, judged by its present length; "never" judged by
    its best possible length. `max_tokens` None means as many as the model's length allows.

    Raises:
        InvalidInput: a value outside its limits, or something that this engine does not support.
    """

    beam_width: int = 4
    max_tokens: int | None = 64
    ignore_eos: bool = False
    temperature: float = 0.0
    """0: beams are compared by the model's own log-probabilities."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.temperature != 0.0:
            raise InvalidInput(
                f"temperature is {self.temperature} in a beam search, which draws nothing; omit it"
            )
        self.to_wire()
        self.sampling_params()

    def to_wire(self) -> protocol.sampling.BeamSearchParams:
        try:
            return protocol.sampling.BeamSearchParams(
                beam_width=self.beam_width,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
            )
        except InvalidParameter as error:
            raise InvalidInput(str(error)) from None

    def sampling_params(self) -> SamplingParams:
        """What of a beam search is as in other requests."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


@dataclasses.dataclass(slots=True)
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


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The beams, best first; none if the request failed, and `detail` says why."""

    sequences: list[BeamSearchSequence]
    request_id: str
    detail: str | None = None


def beam_search_output(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """From a finished request. Text needs a tokenizer; without one it is empty."""
    sequences = []
    detail = None
    for beam in output.outputs:
        if beam.finish_reason in ("error", "abort") or beam.cumulative_logprob is None:
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
