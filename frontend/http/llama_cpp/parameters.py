"""From llama.cpp's fields to `SamplingParams`, and back to its `generation_settings`."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.generation.parameters import same_names
from frontend.http.llama_cpp.bodies import CompletionRequest
from frontend.sampling_params import FIRST_ANSWER_SAMPLING, RequestOutputKind, SamplingParams
from frontend.structured_outputs import StructuredOutputsParams
from frontend.text.sampler_chain import DEFAULT_BREAKERS
from protocol.sampling import DEFAULT_SAMPLERS

_OTHER_FORMS = {"logit_bias", "logprobs", "max_tokens", "samplers"}
_SAME_NAMES = same_names(CompletionRequest) - _OTHER_FORMS
_LETTERS = dict(zip("edskypmxti", (*DEFAULT_SAMPLERS, "infill"), strict=True))
_REPEAT_LAST_N = 64
_INFILL_MIN_P = 0.2
_NEVER = -100.0
_RANDOM_SEED = 2**32 - 1
_UNUSED: dict[str, Any] = {
    "mirostat_tau": 5.0, "mirostat_eta": 0.1, "n_keep": 0, "n_discard": 0, "min_keep": 0,
    "post_sampling_probs": False, "lora": [],
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
    given |= {"repetition_penalty": asked.repeat_penalty, "n": asked.n_cmpl or asked.n}
    given = {name: value for name, value in given.items() if value is not None}
    like_theirs = {"max_tokens": None, "repeat_last_n": _REPEAT_LAST_N}
    found = {**like_theirs, **recommended, **llm.preset_sampling, **given}
    if (most := most_tokens(asked)) is not None:
        found["max_tokens"] = None if most == -1 else max(1, most)
    found |= {name: max(0, found[name]) for name in ("temperature", "top_k") if name in found}
    if found.get("seed") == _RANDOM_SEED:
        found["seed"] = None
    if asked.samplers is not None:
        names = [_LETTERS.get(each, each) for each in asked.samplers]
        if "infill" in names:
            found["min_p"] = max(_INFILL_MIN_P, found.get("min_p", 0.0))
        found["samplers"] = ["min_p" if name == "infill" else name for name in names]
    elif found.get("temperature") != 0:
        found.setdefault("samplers", [*DEFAULT_SAMPLERS])  # vLLM's come in another order
    if asked.stop is not None:
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        found["stop"] = [each for each in stop if each]
    is_delta = asked.stream or asked.n_indent or (asked.t_max_predict_ms or 0) > 0
    found |= {
        "logprobs": (asked.n_probs if asked.n_probs is not None else asked.logprobs) or None,
        "logit_bias": _logit_bias(llm, asked),
        "structured_outputs": _structured_outputs(asked),
        "stop_token_ids": None if asked.ignore_eos else list(stop_token_ids),
        "output_kind": RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY,
    }
    return dataclasses.replace(llm.get_default_sampling_params(), **found)


def _structured_outputs(asked: CompletionRequest) -> StructuredOutputsParams | None:
    if asked.grammar and asked.json_schema is not None:
        raise ApiError(400, "grammar and json_schema are both given; omit one", param="grammar")
    if asked.json_schema is not None:
        return StructuredOutputsParams(
            json=asked.json_schema or {"type": "object"},
            disable_additional_properties=True,  # llama.cpp's grammars have none
            field="json_schema",
        )
    if asked.grammar:
        return StructuredOutputsParams(grammar=asked.grammar, field="grammar")
    return None


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
                encode = functools.partial(llm.input_processor.encode, add_special_tokens=False)
                token_ids = [int(text)] if is_id else encode(text, "logit_bias")
            case _:
                what = f"logit_bias has {pair!r:.100}, give [token, bias]"
                raise ApiError(400, what, param="logit_bias")
        found |= dict.fromkeys(token_ids, _NEVER if bias is False else bias)
    return found or None


def generation_settings(asked: CompletionRequest, params: SamplingParams) -> dict[str, Any]:
    """All that the answer was made with, by llama.cpp's names."""
    same = {name: getattr(params, name) for name in sorted(_SAME_NAMES - {"n"})}
    breakers = params.dry_sequence_breakers
    most = most_tokens(asked)
    most = (params.max_tokens or -1) if most is None else most
    return {
        **_UNUSED,
        **same,
        "seed": _RANDOM_SEED if params.seed is None else params.seed,
        "repeat_penalty": params.repetition_penalty,
        "max_tokens": most,
        "n_predict": most,
        "stream": bool(asked.stream),
        "logit_bias": [{"token": t, "bias": b} for t, b in (params.logit_bias or {}).items()],
        "n_probs": params.logprobs or 0,
        "grammar": asked.grammar or "",
        "samplers": [*DEFAULT_SAMPLERS] if params.samplers is None else params.samplers,
        "dry_sequence_breakers": [*DEFAULT_BREAKERS] if breakers is None else breakers,
        "timings_per_token": bool(asked.timings_per_token),
    }
