"""From llama.cpp's fields to `SamplingParams`, and back to its `generation_settings`."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.generation.parameters import same_names
from frontend.http.llama_cpp.bodies import CompletionRequest
from frontend.sampling_params import FIRST_ANSWER_SAMPLING, RequestOutputKind, SamplingParams
from frontend.structured_outputs import StructuredOutputsParams

_SAME_NAMES = same_names(CompletionRequest) - {"logit_bias", "logprobs", "max_tokens"}
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_OFF: dict[str, dict[str, Any]] = {
    "penalties": _PENALTIES,
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
"""Samplers that change something here, and what turns each off."""
_OTHERS = {
    "dry": "d",
    "top_n_sigma": "s",
    "typ_p": "y",
    "typical_p": "y",
    "xtc": "x",
    "infill": "i",
}
_LETTERS = {"e": "penalties", "k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature"}
_LETTERS |= {letter: name for name, letter in _OTHERS.items()}
_INFILL_MIN_P = 0.2
_NEVER = -100.0
_RANDOM_SEED = 2**32 - 1
_UNUSED: dict[str, Any] = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0,
    "xtc_threshold": 0.1, "typical_p": 1.0, "repeat_last_n": -1, "dry_multiplier": 0.0,
    "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"], "mirostat": 0, "mirostat_tau": 5.0,
    "mirostat_eta": 0.1, "n_keep": 0, "n_discard": 0, "min_keep": 0, "post_sampling_probs": False,
    "lora": [],
}  # fmt: skip
"""What clients may look for in `generation_settings`, as it is where it asks for nothing."""


def most_tokens(asked: CompletionRequest) -> int | None:
    """Most tokens of an answer; None: the request does not say; -1: as there is room for."""
    given = (asked.n_predict, asked.max_tokens, asked.max_completion_tokens)
    return next((number for number in given if number is not None), None)


def sampling_params(
    llm: AsyncLLM, asked: CompletionRequest, *, stop_token_ids: tuple[int, ...] = ()
) -> SamplingParams:
    """Raises ApiError, InvalidInput: what the engine does not do."""
    recommended = {} if llm.model.default_sampling else {**FIRST_ANSWER_SAMPLING, "min_p": 0.05}
    given = {name: getattr(asked, name) for name in _SAME_NAMES}
    given["repetition_penalty"] = asked.repeat_penalty
    given["n"] = asked.n_cmpl or asked.n
    most = most_tokens(asked)
    given["max_tokens"] = None if most is None else max(1, most)
    given = {name: value for name, value in given.items() if value is not None}
    if most in (None, -1):
        given["max_tokens"] = None if most else llm.preset_sampling.get("max_tokens")
    found = {**recommended, **llm.preset_sampling, **given}
    for name, least in (("temperature", 0.0), ("top_k", 0)):
        if name in found:
            found[name] = max(least, found[name])
    if found.get("seed") == _RANDOM_SEED:
        found["seed"] = None
    if asked.repeat_last_n == 0:
        found |= _PENALTIES
    if asked.samplers is not None:
        found |= _switched_off(asked.samplers, found)
    penalised = any(found.get(name, off) != off for name, off in _PENALTIES.items())
    if penalised and asked.repeat_last_n not in (None, -1):
        what = f"repeat_last_n is {asked.repeat_last_n}, and penalties look at all tokens; use -1"
        raise ApiError(400, what, param="repeat_last_n")
    if asked.stop is not None:
        found["stop"] = [
            each for each in ([asked.stop] if isinstance(asked.stop, str) else asked.stop) if each
        ]
    is_delta = asked.stream or asked.n_indent or (asked.t_max_predict_ms or 0) > 0
    found |= {
        "logprobs": (asked.n_probs if asked.n_probs is not None else asked.logprobs) or None,
        "logit_bias": _logit_bias(llm, asked),
        "structured_outputs": _structured_outputs(asked),
        "stop_token_ids": None if asked.ignore_eos else list(stop_token_ids),
        "output_kind": RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY,
    }
    return dataclasses.replace(llm.get_default_sampling_params(), **found)


def _switched_off(samplers: list[str] | str, found: dict[str, Any]) -> dict[str, Any]:
    names = (
        [_LETTERS.get(each, each) for each in samplers] if isinstance(samplers, str) else samplers
    )
    for name in names:
        if name not in _OFF and name not in _OTHERS:
            known = ", ".join((*_OFF, *_OTHERS))
            what = f"samplers has {name!r:.100}, known are {known}"
            raise ApiError(400, what, param="samplers")
    off: dict[str, Any] = {}
    for name, values in _OFF.items():
        if name not in names:
            off |= values
    if "infill" in names:
        off["min_p"] = max(_INFILL_MIN_P, off.get("min_p", found.get("min_p", 0.0)))
    return off


def _structured_outputs(asked: CompletionRequest) -> StructuredOutputsParams | None:
    if asked.grammar and asked.json_schema is not None:
        raise ApiError(400, "grammar and json_schema are both given; omit one", param="grammar")
    if asked.json_schema is not None:
        return StructuredOutputsParams(
            json=asked.json_schema or {"type": "object"},
            disable_additional_properties=True,  # llama.cpp's grammars have none
            field="json_schema",
        )
    return (
        StructuredOutputsParams(grammar=asked.grammar, field="grammar") if asked.grammar else None
    )


def _logit_bias(llm: AsyncLLM, asked: CompletionRequest) -> dict[int, float] | None:
    """The biases of tokens, those of texts for each of their tokens."""
    given = asked.logit_bias
    found: dict[int, float] = {}
    pairs: Iterable[Any] = given.items() if isinstance(given, dict) else given or ()
    for pair in pairs:
        match pair:
            case (int() as token, float() | int() as bias):
                token_ids = [token]
            case (str() as text, float() | int() as bias):
                is_id = isinstance(given, dict) and text.isdecimal()
                tokenizer = llm.get_tokenizer()
                token_ids = [int(text)] if is_id else tokenizer.encode(text, False)
            case _:
                what = f"logit_bias has {pair!r:.100}, give [token, bias]"
                raise ApiError(400, what, param="logit_bias")
        found |= dict.fromkeys(token_ids, _NEVER if bias is False else bias)
    return found or None


def generation_settings(
    llm: AsyncLLM, asked: CompletionRequest, params: SamplingParams
) -> dict[str, Any]:
    """All that the answer was made with, by llama.cpp's names."""
    same = {name: getattr(params, name) for name in sorted(_SAME_NAMES - {"n"})}
    most = most_tokens(asked)
    most = (params.max_tokens or -1) if most is None else most
    return {
        **{name: getattr(params, name, value) for name, value in _UNUSED.items()},
        **same,
        "seed": _RANDOM_SEED if params.seed is None else params.seed,
        "repeat_penalty": params.repetition_penalty,
        "max_tokens": most,
        "n_predict": most,
        "stream": bool(asked.stream),
        "logit_bias": [{"token": t, "bias": b} for t, b in (params.logit_bias or {}).items()],
        "n_probs": params.logprobs or 0,
        "grammar": asked.grammar or "",
        "samplers": asked.samplers or [*_OFF],
        "timings_per_token": bool(asked.timings_per_token),
    }
