"""vLLM's `SamplingParams` and `BeamSearchParams`, and their translation for the engine. Names,
order and defaults are vLLM's. What this engine does not do is refused by name."""

import copy
import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from msgspec.structs import replace

import protocol.errors
import protocol.sampling
from frontend.errors import InvalidInput, PromptTooLong
from frontend.structured_outputs import StructuredOutputsParams, to_wire
from frontend.text.sampler_chain import SamplerChainFields, chain_of, neutral_values
from protocol.errors import InvalidParameter
from protocol.sampling import check_whole

MAX_N = 16_384
MAX_STOP_STRINGS, MAX_STOP_CHARS = 128, 4096
"""Of a request, the characters of all together: each new token's text is searched for them."""
_MAX_BAD_WORD_CHARS = 16_384
_REALS = frozenset({
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
})  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "logprob_token_ids", "allowed_token_ids", "bad_words")
_UNLIMITED = 2**62
_RECOMMENDABLE = _REALS | {"top_k", "max_tokens", "min_tokens"}
FIRST_ANSWER_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
"""At the terminal, for a model that recommends nothing: llama.cpp's defaults, and nearly Ollama's.
Python has vLLM's, which draw from the whole distribution."""
GuidedDecodingParams = StructuredOutputsParams
"""The name in earlier versions of vLLM."""
_SAME_IN_ENGINE = _REALS | {"ignore_eos", "logprobs"}


class RequestOutputKind(enum.Enum):
    """The part of an answer that each output of a stream holds."""

    CUMULATIVE = 0
    """All so far."""
    DELTA = 1
    """The part that is new since the last one."""
    FINAL_ONLY = 2
    """Nothing until the end, then all."""


@dataclass
class RepetitionDetectionParams:
    """vLLM's: ends a sequence whose output ends in a pattern of `min_pattern_size` (0 is 1) to
    `max_pattern_size` tokens, `min_count` times in a row. `max_pattern_size` 0: off.
    Raises InvalidInput: a value outside its limits."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        self.to_wire()

    def to_wire(self) -> protocol.sampling.RepetitionDetection | None:
        if self.max_pattern_size == self.min_pattern_size == 0:
            return None
        with as_invalid_input():
            return protocol.sampling.RepetitionDetection(
                max_pattern_size=self.max_pattern_size,
                min_pattern_size=self.min_pattern_size or 1,
                min_count=self.min_count,
            )


@dataclass
class SamplingParams(SamplerChainFields):
    """How to generate.

    Meanings are vLLM's, but of the fields by llama.cpp's names. `top_k` 0 or -1 keeps all tokens.
    `max_tokens` None means as many as the model's length allows. `seed` None (or -1) draws one.
    `truncate_prompt_tokens` k keeps the last k prompt tokens, -1 as many as the model takes. A
    temperature below 1e-5 is greedy, as is a `top_p` of 0, which vLLM refuses. With `best_of` above
    `n` so many samples are drawn, and those `n` with the largest sum of log-probabilities given at
    the end; `logprobs` is 0 at least.
    Raises InvalidInput: a value outside its limits, values that contradict each other, or something
    that this engine does not support."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: Any | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | dict[str, Any] | None = None
    logit_bias: dict[int, float] | dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    thinking_token_budget: int | None = None
    watermarking: bool | None = None
    prompt_logprob_token_ids: Any | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    stream_interval: int | None = None
    skip_reading_prefix_cache: bool | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    best_of: int | None = None
    use_beam_search: bool = False

    def __post_init__(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
            if not (value is None or is_list or (name == "stop" and isinstance(value, str))):
                raise InvalidInput(f"{name} is {value!r:.100}, it must be a list")
        self.stop = list(self.stop_strings)
        self.stop_token_ids = list(self.stop_token_ids or ())
        self.bad_words = list(dict.fromkeys(self.bad_words or ()))
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:  # vLLM's reading of OpenAI's flag
                setattr(self, name, 1)
        self.check()
        if self.num_sequences > self.n:
            self.output_kind = RequestOutputKind.FINAL_ONLY
            if self.logprobs is None and not self.logprob_token_ids:
                self.logprobs = 0

    @classmethod
    def from_defaults(cls, defaults: Mapping[str, float]) -> Self:
        """The parameters that a model's authors recommend; the rest by default."""
        names = _RECOMMENDABLE & defaults.keys()
        return cls(**{name: type(getattr(cls, name))(defaults[name]) for name in names})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_sequences(self) -> int:
        """How many samples are drawn."""
        return self.n if self.best_of is None else self.best_of

    def clone(self) -> Self:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    def check(self) -> None:
        """Raises InvalidInput: see the class."""
        self._refuse_unsupported()
        with as_invalid_input():
            check_whole("n", self.n, minimum=1, maximum=MAX_N)
            if self.best_of is not None:
                check_whole("best_of", self.best_of, minimum=self.n, maximum=MAX_N)
            if self.truncate_prompt_tokens not in (None, -1):
                check_whole("truncate_prompt_tokens", self.truncate_prompt_tokens, minimum=1)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise InvalidInput(f"{field.name} is {value!r}, it must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidInput(
                f"output_kind is {self.output_kind!r}, it must be a RequestOutputKind"
            )
        stop, words = self.stop_strings, self.bad_words or ()
        _check_texts("stop", stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        _check_texts("bad_words", words, protocol.sampling.MAX_BAD_WORDS, _MAX_BAD_WORD_CHARS)
        for string in stop:
            if not isinstance(string, str):
                raise InvalidInput(f"stop holds {string!r}, it must hold strings only")
            if not string:
                raise InvalidInput("stop holds an empty string, which is everywhere; remove it")
        if self.thinking_token_budget is not None:
            with as_invalid_input():
                check_whole("thinking_token_budget", self.thinking_token_budget, minimum=0)
        for word in words:
            if not (isinstance(word, str) and word):
                raise InvalidInput(f"bad_words holds {word!r}, it must hold non-empty strings only")
        detection = self.repetition_detection
        if not isinstance(detection, RepetitionDetectionParams | None):
            raise InvalidInput(
                f"repetition_detection is {detection!r}, it must be RepetitionDetectionParams"
            )
        if self.stop_strings and not self.detokenize:
            raise InvalidInput(
                "stop strings need text, and detokenize is False; set detokenize=True or use "
                "stop_token_ids"
            )
        # The rest is checked by the engine's own rules, with the largest possible answer.
        max_tokens = _UNLIMITED if self.max_tokens is None else self.max_tokens
        if isinstance(max_tokens, int):
            max_tokens = min(max_tokens, _UNLIMITED)  # the model's length ends it before
        wire = self._engine_params(max_tokens=max_tokens, min_tokens=self.min_tokens)
        if wire.is_greedy and self.num_sequences > 1:
            name = "n" if self.n > 1 else "best_of"
            raise InvalidInput(
                f"{name} is {self.num_sequences} with temperature {self.temperature} and top_p "
                f"{self.top_p}: greedy answers would all be the same; use {name}=1, or a "
                "temperature and top_p above 0"
            )

    def to_wire(
        self, prompt_len: int, max_model_len: int, *, seed: int | None = None, vocab_size: int = 1
    ) -> protocol.sampling.SamplingParams:
        """In engine terms, for a prompt of `prompt_len` tokens.

        `max_tokens` becomes what the model's length leaves, where it is None or more than that, and
        -1 `prompt_logprobs` its vocabulary. `seed` overrides the seed.
        Raises InvalidInput: see the class; attributes may have been assigned since it was built."""
        self.check()
        room = max_model_len - prompt_len
        return self._engine_params(
            max_tokens=room if self.max_tokens is None else min(self.max_tokens, room),
            min_tokens=min(self.min_tokens, room),
            seed=self.seed if seed is None else seed,
            vocab_size=vocab_size,
        )

    def _engine_params(
        self, *, max_tokens: int, min_tokens: int, seed: int | None = None, vocab_size: int = 1
    ) -> protocol.sampling.SamplingParams:
        detection = self.repetition_detection
        with as_invalid_input():
            wire = protocol.sampling.SamplingParams(
                **{name: getattr(self, name) for name in _SAME_IN_ENGINE},
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                top_k=0 if self.top_k == -1 else self.top_k,
                seed=self.seed if seed is None else seed,
                prompt_logprobs=vocab_size if self.prompt_logprobs == -1 else self.prompt_logprobs,
                logprob_token_ids=tuple(self.logprob_token_ids or ()),
                repetition_detection=None if detection is None else detection.to_wire(),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                has_stop_strings=bool(self.stop_strings),
                logit_bias=_with_whole_keys(self.logit_bias),
                allowed_token_ids=(
                    None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
                ),
                structured_output=to_wire(self.structured_outputs, self.guided_decoding),
                extra_args=_as_json(self.extra_args),
            )
            chain = chain_of(self, has_penalties=wire.has_penalties)
            if chain is None:
                return wire
            return replace(wire, chain=chain, **neutral_values(chain))

    def _refuse_unsupported(self) -> None:
        unsupported = {
            "logits_processors (use logit_bias or allowed_token_ids, or start the engine with "
            "--logits-processors and use extra_args)": bool(self.logits_processors),
            "watermarking": bool(self.watermarking),
            f"mirostat {self.mirostat!r:.40} (its state is made of the probabilities of all tokens "
            "before, which no restart would give back; use typical_p, top_n_sigma or min_p)": (
                self.mirostat != 0
            ),
            "prompt_logprob_token_ids (use prompt_logprobs)": (
                self.prompt_logprob_token_ids is not None or self.prompt_logprob_start is not None
            ),
            "flat_logprobs": self.flat_logprobs,
            "stream_interval": self.stream_interval not in (None, 1),
            "skip_reading_prefix_cache (use a cache_salt of its own)": bool(
                self.skip_reading_prefix_cache
            ),
            "routed_experts_prompt_start": self.routed_experts_prompt_start != 0,
            "trace_decode_token_ids": self.trace_decode_token_ids is not None,
            "use_beam_search (use LLM.beam_search with BeamSearchParams)": bool(
                self.use_beam_search
            ),
            "spaces_between_special_tokens=False with skip_special_tokens=False": (
                not self.spaces_between_special_tokens and not self.skip_special_tokens
            ),
        }
        for name, is_asked in unsupported.items():
            if is_asked:
                raise InvalidInput(f"this engine does not support {name}; omit it")


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Results are those of transformers' `generate(num_beams=beam_width, do_sample=False)`.

    Fields are explained at `protocol.sampling.BeamSearchParams`. `max_tokens` None means as many as
    the model's length allows. Raises InvalidInput: a value outside its limits, or something that
    this engine does not support."""

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
        with as_invalid_input():
            return protocol.sampling.BeamSearchParams(
                beam_width=self.beam_width,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
            )

    def sampling_params(self) -> SamplingParams:
        """The parameters of a beam search that other requests have, too."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _check_texts(name: str, texts: Sequence[object], most: int, most_chars: int) -> None:
    num_chars = sum(len(each) for each in texts if isinstance(each, str))
    if len(texts) > most or num_chars > most_chars:
        raise InvalidInput(
            f"{name} has {len(texts)} texts of {num_chars} characters, the limit is {most} of "
            f"{most_chars} together; name fewer"
        )


def _with_whole_keys(logit_bias: Mapping[Any, float] | None) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in (logit_bias or {}).items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
            key = int(key)
        if not isinstance(key, int):
            raise InvalidInput(f"logit_bias has the key {key!r:.100}, it must be a token id")
        biases[key] = bias
    return biases


def _as_json(extra_args: object) -> str | None:
    if not extra_args:
        return None
    if not isinstance(extra_args, dict) or not all(isinstance(key, str) for key in extra_args):
        raise InvalidInput(f"extra_args is {extra_args!r:.200}, it must be a dict by name")
    try:
        return json.dumps(extra_args, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"extra_args cannot be sent as JSON: {error}; use numbers, texts, lists and dicts"
        ) from None


class as_invalid_input:  # noqa: N801 - as contextlib's
    """Raise the protocol's refusals as InvalidInput."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, InvalidParameter):
            if isinstance(error, protocol.errors.PromptTooLong):
                raise PromptTooLong(str(error), error.num_tokens, error.most) from None
            raise InvalidInput(str(error)) from None
        if isinstance(error, TypeError):
            raise InvalidInput(f"a sampling parameter has the wrong type: {error}") from None
