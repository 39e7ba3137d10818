"""llama.cpp's samplers by its names: fields that `SamplingParams` has beside vLLM's, what they
mean for the engine, and the tokens that DRY's breakers begin with."""

import dataclasses
import operator
import weakref
from collections.abc import Sequence
from typing import Any

from frontend.errors import InvalidInput
from frontend.text.tokenizer import Tokenizer
from protocol.sampling import DEFAULT_SAMPLERS, SamplerChain

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS, MAX_BREAKER_CHARS, _MAX_TAIL = 32, 40, 20
_OTHER_NAMES = {
    "nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical_p": "typ_p",
    **{name.replace("_", with_): name for name in DEFAULT_SAMPLERS for with_ in ("-", "")},
}  # fmt: skip
_NEUTRAL: dict[str, dict[str, Any]] = {
    "penalties": {
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    },
    "top_k": {"top_k": 0}, "top_p": {"top_p": 1.0}, "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}  # fmt: skip
Breakers = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""(First tokens, the tokens that must follow), see `protocol.sampling.SamplerChain`."""
_MOST_KNOWN = 64
_known: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], Breakers]] = (
    weakref.WeakKeyDictionary()
)
"""A look at every token takes a tenth of a second."""


@dataclasses.dataclass(kw_only=True)
class SamplerChainFields:
    """llama.cpp's parameters, with its defaults, which do nothing; for their meaning see
    `protocol.sampling.SamplerChain`. One that does something makes the request's samplers run in
    the order of `samplers`: if None, in llama.cpp's. `dry_sequence_breakers` None: line break,
    colon, quotation mark, asterisk. `mirostat` may be 0 alone."""

    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: list[str] | None = None
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int | None = None
    mirostat: int = 0
    samplers: list[str] | None = None


_SAME_IN_ENGINE = {*SamplerChain.__struct_fields__} - {"samplers", "dry_breakers"}
_values_of = operator.attrgetter(*(each.name for each in dataclasses.fields(SamplerChainFields)))
_DEFAULTS = _values_of(SamplerChainFields)


def chain_of(params: SamplerChainFields, *, has_penalties: bool) -> SamplerChain | None:
    """What the engine does beside vLLM's sampling; None: nothing.
    Raises InvalidInput, InvalidParameter: a value outside its limits."""
    if _values_of(params) == _DEFAULTS:
        return None
    names = params.samplers
    _check_list("samplers", names)
    chain = SamplerChain(
        samplers=(
            DEFAULT_SAMPLERS
            if names is None
            else tuple(_OTHER_NAMES.get(name.lower(), name.lower()) for name in names)
        ),
        **{name: getattr(params, name) for name in _SAME_IN_ENGINE},
    )
    _check_list("dry_sequence_breakers", params.dry_sequence_breakers)
    _check_breakers(params.dry_sequence_breakers or ())
    does_something = (
        names is not None
        or chain.typical_p < 1.0
        or chain.top_n_sigma > 0.0
        or (chain.xtc_probability > 0.0 and chain.xtc_threshold <= 0.5)
        or (chain.dry_multiplier > 0.0 and chain.dry_penalty_last_n != 0)
        or chain.dynatemp_range > 0.0
        or (chain.repeat_last_n is not None and has_penalties)
    )
    return chain if does_something else None


def neutral_values(chain: SamplerChain) -> dict[str, Any]:
    """Values of `SamplingParams` for the samplers that the chain leaves out."""
    absent = [values for name, values in _NEUTRAL.items() if name not in chain.samplers]
    return {name: value for values in absent for name, value in values.items()}


def breaker_tokens(breakers: Sequence[str] | None, tokenizer: Tokenizer) -> Breakers:
    """As llama.cpp has it: a token that holds the whole text breaks; one that ends in a part of it
    does if the tokens of the rest follow, of which 20 are looked at."""
    texts = DEFAULT_BREAKERS if breakers is None else tuple(breakers)
    known = _known.setdefault(tokenizer, {})
    if texts not in known:
        if len(known) == _MOST_KNOWN:
            known.clear()
        known[texts] = _find_breakers(texts, tokenizer)
    return known[texts]


def _find_breakers(breakers: tuple[str, ...], tokenizer: Tokenizer) -> Breakers:
    ids = [[token_id] for token_id in range(tokenizer.vocab_size)]
    texts = tokenizer.backend.decode_batch(ids, skip_special_tokens=False)
    heads_of: dict[tuple[int, ...], set[int]] = {}
    for breaker in breakers:
        tails = {
            breaker[:size]: tuple(
                tokenizer.encode(breaker[size:], add_special_tokens=False)[:_MAX_TAIL]
            )
            for size in range(1, len(breaker))
        }
        for token_id, text in enumerate(texts):
            if breaker in text:
                heads_of.setdefault((), set()).add(token_id)
                continue
            for start, tail in tails.items():
                if text.endswith(start):
                    heads_of.setdefault(tail, set()).add(token_id)
    return tuple((tuple(sorted(heads)), tail) for tail, heads in heads_of.items())


def _check_list(name: str, given: object) -> None:
    if given is not None and not (
        isinstance(given, list | tuple) and all(isinstance(each, str) for each in given)
    ):
        raise InvalidInput(f"{name} is {given!r:.200}, it must be a list of strings")


def _check_breakers(breakers: Sequence[str]) -> None:
    longest = max(map(len, breakers), default=0)
    if len(breakers) > MAX_BREAKERS or longest > MAX_BREAKER_CHARS or "" in breakers:
        raise InvalidInput(
            f"dry_sequence_breakers are {len(breakers)} texts of up to {longest} characters, the "
            f"limit is {MAX_BREAKERS} of 1 to {MAX_BREAKER_CHARS}; name fewer, or shorter ones"
        )
