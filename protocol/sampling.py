"""How the next token is chosen: the parameters of the engine. Options about text, such as stop
strings, are the client's and are not sent."""

import math
from collections.abc import Collection
from typing import cast

import msgspec

from protocol.base import Message
from protocol.errors import InvalidParameter
from protocol.structured_output import StructuredOutput

MAX_SEED = 2**64 - 1
MAX_BEAM_WIDTH = 64
MAX_PROMPT_LOGPROBS = 2**23
"""Log-probabilities of one prompt: positions times those of a position. 64 MiB on the wire."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 1024
"""Most bad words of a request, and most tokens of all of them together."""
MAX_PATTERN_SIZE = 1024
MAX_EXTRA_ARGS_CHARS = 64 * 1024
DEFAULT_SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""llama.cpp's samplers, in its order."""
MAX_SAMPLERS, MAX_BREAKER_TOKENS = 32, 2**19
MAX_WHOLE = 2**63 - 1
"""The largest whole number without a limit of its own: what arrays hold."""
MIN_DIVISOR, MAX_DIVISOR = 1e-6, 1e6
"""Logits that are divided by such numbers stay finite float32."""
_MAX_INT32 = 2**31 - 1
_CHAIN_LIMITS = {
    "typical_p": (0.0, 1.0), "top_n_sigma": (-1.0, MAX_DIVISOR),
    "xtc_probability": (0.0, 1.0), "xtc_threshold": (0.0, 1.0),
    "dry_multiplier": (0.0, MAX_DIVISOR), "dry_base": (1.0, MAX_DIVISOR),
    "dynatemp_range": (0.0, MAX_DIVISOR), "dynatemp_exponent": (0.0, MAX_DIVISOR),
}  # fmt: skip
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy: dividing by them would overflow."""


class RepetitionDetection(Message, frozen=True):
    """Ends a sequence whose output ends in one pattern, `min_count` times in a row. Raises
    InvalidParameter: a value outside its limits."""

    max_pattern_size: int
    """The longest pattern, in tokens."""
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        name = "repetition_detection."
        most = MAX_PATTERN_SIZE
        check_whole(f"{name}max_pattern_size", self.max_pattern_size, minimum=1, maximum=most)
        most = self.max_pattern_size
        check_whole(f"{name}min_pattern_size", self.min_pattern_size, minimum=1, maximum=most)
        check_whole(f"{name}min_count", self.min_count, minimum=2)


class ThinkingBudget(Message, frozen=True):
    """Most tokens of a block of reasoning, between its markers; then its end is forced. Raises
    InvalidParameter: a value outside its limits."""

    max_tokens: int
    start_token_id: int
    end_token_id: int

    def __post_init__(self) -> None:
        check_whole("thinking_token_budget", self.max_tokens, minimum=0)


class SamplerChain(Message, frozen=True):
    """llama.cpp's samplers; `SamplingParams` has the numbers that vLLM knows, too. Raises
    InvalidParameter: a value outside its limits."""

    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """Their order. What is left out is not applied, and is neutral in `SamplingParams`; what
    stands twice is applied twice."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the entropy, up to this probability (locally
    typical sampling, arXiv:2202.00666); 1 keeps all."""
    top_n_sigma: float = -1.0
    """Keep logits within so many standard deviations of the largest; 0 and below keep all."""
    xtc_probability: float = 0.0
    """How often all tokens of at least `xtc_threshold` but the least likely of them are dropped."""
    xtc_threshold: float = 0.1
    """Above 0.5 nothing is dropped."""
    dry_multiplier: float = 0.0
    """A token that would lengthen a repetition of n tokens loses `dry_multiplier * dry_base **
    (n - dry_allowed_length)`, where n is at least that length."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    """Tokens of prompt and output that are searched for repetitions; 0 is none, -1 all."""
    dry_breakers: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """What no repetition reaches beyond: (first tokens, the tokens behind each of these)."""
    dynatemp_range: float = 0.0
    """The temperature lies so far around the request's: low where the entropy is low."""
    dynatemp_exponent: float = 1.0
    repeat_last_n: int | None = None
    """All penalties count the last n tokens of prompt and output; 0 is none, -1 all. None: as
    vLLM's do."""

    def __post_init__(self) -> None:
        known = ", ".join(DEFAULT_SAMPLERS)
        check_whole("the length of samplers", len(self.samplers), minimum=0, maximum=MAX_SAMPLERS)
        for name in self.samplers:
            if name not in DEFAULT_SAMPLERS:
                raise InvalidParameter(f"samplers holds {name!r:.100}, its names are {known}")
        for name, (least, most) in _CHAIN_LIMITS.items():
            _number(name, getattr(self, name), minimum=least, maximum=most)
        check_whole("dry_allowed_length", self.dry_allowed_length, minimum=0, maximum=_MAX_INT32)
        check_whole("dry_penalty_last_n", self.dry_penalty_last_n, minimum=-1, maximum=_MAX_INT32)
        if self.repeat_last_n is not None:
            check_whole("repeat_last_n", self.repeat_last_n, minimum=-1, maximum=_MAX_INT32)
        number = sum(len(heads) + len(tail) for heads, tail in self.dry_breakers)
        if number > MAX_BREAKER_TOKENS:
            raise InvalidParameter(
                f"dry_sequence_breakers begin with {number} tokens, the limit is "
                f"{MAX_BREAKER_TOKENS}; name fewer, or longer ones"
            )
        for heads, tail in self.dry_breakers:
            _check_token_ids("dry_sequence_breakers", (*heads, *tail))


class GenerationRules(Message, frozen=True):
    """What a model's generation config says of any answer: transformers' `suppress_tokens`,
    `begin_suppress_tokens`, `forced_bos_token_id` and `forced_eos_token_id`."""

    suppressed: tuple[int, ...] = ()
    """Never chosen."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that are impossible as the first one."""
    forced_first: int | None = None
    forced_last: int | None = None
    """The token that `max_tokens` makes the last."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that are named."""
        forced = (each for each in (self.forced_first, self.forced_last) if each is not None)
        return (*self.suppressed, *self.suppressed_first, *forced)


class SamplingParams(Message, frozen=True):
    """Parameters of one request, in engine terms. Checked on construction and on decode. Raises
    InvalidParameter: a value outside its limits, or two values that contradict each other."""

    max_tokens: int
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked until this many tokens exist."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k largest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p (nucleus sampling); 0 keeps the
    likeliest token alone, as temperature 0 does."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest token."""
    repetition_penalty: float = 1.0
    """Over prompt and output: divide positive logits, multiply negative ones (CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from each token that the output already holds, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output, in [-2, 2]."""
    seed: int | None = None
    """Random numbers are a function of (seed, position). None: the engine draws a seed."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Added to the named tokens' logits, each in [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that are possible; None: all are."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report a position; 0 reports only the sampled one,
    -1 the whole vocabulary, None nothing."""
    prompt_logprobs: int | None = None
    """Likewise, from 0, of each token of the prompt but the first. The whole prompt is computed for
    it, whatever of it is cached."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report the log-probabilities of these tokens, not of the likeliest."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens that the output may not hold one behind the other: the last is impossible where the
    others stand before it."""
    repetition_detection: RepetitionDetection | None = None
    thinking: ThinkingBudget | None = None
    generation_rules: GenerationRules | None = None
    has_stop_strings: bool = False
    """The client may end it at any token: no step computes several of them."""
    structured_output: StructuredOutput | None = None
    """If given, tokens that lead out of it are impossible, and it ends the text."""
    extra_args: str | None = None
    """An object of JSON for the engine's logits processors."""
    chain: SamplerChain | None = None
    """If given, penalties, temperature, top_k, top_p and min_p are its steps, in its order."""

    def __post_init__(self) -> None:
        """Every limit that does not depend on the model."""
        check_whole("max_tokens", self.max_tokens, minimum=1)
        check_whole("min_tokens", self.min_tokens, minimum=0)
        _number("temperature", self.temperature, minimum=0.0, maximum=MAX_DIVISOR)
        check_whole("top_k", self.top_k, minimum=0, maximum=_MAX_INT32)
        _number("top_p", self.top_p, minimum=0.0, maximum=1.0)
        _number("min_p", self.min_p, minimum=0.0, maximum=1.0)
        _number("presence_penalty", self.presence_penalty, minimum=-2.0, maximum=2.0)
        _number("frequency_penalty", self.frequency_penalty, minimum=-2.0, maximum=2.0)
        penalty = self.repetition_penalty
        _number("repetition_penalty", penalty, minimum=0.0, maximum=MAX_DIVISOR)
        if penalty == 0.0:
            raise InvalidParameter("repetition_penalty is 0, it must be above 0; 1 switches it off")
        _number("repetition_penalty", penalty, minimum=MIN_DIVISOR, maximum=MAX_DIVISOR)
        if self.seed is not None:
            check_whole("seed", self.seed, minimum=0, maximum=MAX_SEED)
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, minimum=-1)
        if self.prompt_logprobs is not None:
            check_whole("prompt_logprobs", self.prompt_logprobs, minimum=0)
        self._check_logprob_token_ids()
        self._check_bad_words()
        _check_token_ids("logit_bias", self.logit_bias)
        biases = self.logit_bias.values()
        # most are right, and there may be one for each token of the vocabulary
        if not (set(map(type, biases)) <= {float} and all(map((100.0).__ge__, map(abs, biases)))):
            for token_id, bias in self.logit_bias.items():
                _number(f"logit_bias of token {token_id}", bias, minimum=-100.0, maximum=100.0)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        _check_token_ids("allowed_token_ids", self.allowed_token_ids or ())
        if self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )
        if self.extra_args is not None and len(self.extra_args) > MAX_EXTRA_ARGS_CHARS:
            raise InvalidParameter(
                f"extra_args are {len(self.extra_args)} characters of JSON, the limit is "
                f"{MAX_EXTRA_ARGS_CHARS}; give fewer"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids is empty: no token could be sampled; omit it")

        if self.structured_output is not None and self.ignore_eos:
            raise InvalidParameter(
                "ignore_eos with structured_outputs: the answer ends where its grammar does; omit "
                "one of them"
            )

    def _check_logprob_token_ids(self) -> None:
        _check_token_ids("logprob_token_ids", self.logprob_token_ids)
        number = len(self.logprob_token_ids)
        if number > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidParameter(
                f"logprob_token_ids has {number} entries, the limit is {MAX_LOGPROB_TOKEN_IDS}; "
                "name fewer, or use logprobs=-1"
            )
        if number and self.logprobs not in (None, number):
            raise InvalidParameter(
                f"logprobs is {self.logprobs}, and logprob_token_ids has {number} entries; omit "
                "logprobs or make them equal"
            )

    def _check_bad_words(self) -> None:
        asked = self.structured_output
        if self.thinking is not None and asked is not None and asked.reasoning is None:
            raise InvalidParameter(
                "thinking_token_budget and structured_outputs contradict: a grammar has no end of "
                "thinking; omit one, or name structured_outputs_config's reasoning_parser"
            )
        for word in self.bad_words:
            check_whole("tokens of a word in bad_words", len(word), minimum=1)
        number, size = len(self.bad_words), sum(map(len, self.bad_words))
        if number > MAX_BAD_WORDS or size > MAX_BAD_WORD_TOKENS:
            raise InvalidParameter(
                f"bad_words are {number} words of {size} tokens, with and without a space before "
                f"each; the limit is {MAX_BAD_WORDS} of {MAX_BAD_WORD_TOKENS}; name fewer"
            )

    def num_prompt_logprobs(self, num_prompt_tokens: int) -> int:
        """All that are reported of a prompt: of each token but the first its own, and those of the
        likeliest tokens."""
        if self.prompt_logprobs is None:
            return 0
        return (num_prompt_tokens - 1) * (1 + self.prompt_logprobs)

    @property
    def is_greedy(self) -> bool:
        is_cold = self.temperature < GREEDY_TEMPERATURE
        if self.chain is not None and self.chain.dynatemp_range > 0.0:
            is_cold = False
        return is_cold or self.top_p == 0.0

    @property
    def reports_logprobs(self) -> bool:
        """Whether log-probabilities of sampled tokens are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def has_token_rules(self) -> bool:
        """Whether the tokens that are possible depend on those before."""
        has_rules = self.thinking is not None or self.generation_rules is not None
        return has_rules or bool(self.bad_words)

    @property
    def has_plain_outputs(self) -> bool:
        """Its tokens have nothing beside them, and none but a stop token or the last by length can
        end it."""
        return not self.reports_logprobs and self.repetition_detection is None

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class BeamSearchParams(Message, frozen=True):
    """Beam search as transformers' `generate(num_beams=..., do_sample=False)` does it. The
    request's SamplingParams give max_tokens, min_tokens, ignore_eos and stop_token_ids; their
    temperature must be 0. With width 1 it is greedy search.
    Raises InvalidParameter: a value outside its limits."""

    beam_width: int
    length_penalty: float = 1.0
    """A finished beam's score is its cumulative log-probability / length ** length_penalty, where
    length counts generated tokens."""
    early_stopping: bool | str = False
    """True: stop at beam_width finished beams. False: stop when no running beam can still become
    better, judged by its present length. "never": judged by its best possible length."""

    def __post_init__(self) -> None:
        check_whole("beam_width", self.beam_width, minimum=1, maximum=MAX_BEAM_WIDTH)
        _number("length_penalty", self.length_penalty, minimum=-100.0, maximum=100.0)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidParameter(
                f'early_stopping is {self.early_stopping!r}, it must be true, false or "never"'
            )


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's sequence `index`: each next one has the next."""
    return (seed + index) & MAX_SEED


def check_whole(name: str, value: object, *, minimum: int, maximum: int = MAX_WHOLE) -> None:
    """Raises InvalidParameter unless `value` is a whole number within the limits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameter(f"{name} is {value!r:.100}, it must be a whole number")
    _within(name, value, minimum, maximum)


def _check_token_ids(name: str, token_ids: Collection[object]) -> None:
    if set(map(type, token_ids)) == {int}:
        whole = cast("Collection[int]", token_ids)
        if 0 <= min(whole) <= max(whole) <= MAX_WHOLE:
            return
    for token_id in token_ids:
        check_whole(f"a token id in {name}", token_id, minimum=0)


def _number(name: str, value: object, *, minimum: float, maximum: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidParameter(f"{name} is {value!r:.100}, it must be a number")
    if value != value or abs(value) == math.inf:
        raise InvalidParameter(f"{name} is {value}, it must be finite")
    _within(name, value, minimum, maximum)


def _within(name: str, value: float, minimum: float, maximum: float) -> None:
    if minimum <= value <= maximum:
        return
    is_printed = not isinstance(value, int) or value.bit_length() <= 512  # Python refuses long ones
    limit = f"from {minimum} to {maximum}"
    if maximum in (MAX_WHOLE, MAX_DIVISOR) and value < minimum:
        limit = f"at least {minimum}"
    raise InvalidParameter(
        f"{name} is {value if is_printed else 'a number of too many digits'}, it must be {limit}"
    )
