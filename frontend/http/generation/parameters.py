"""From a request's fields to `SamplingParams`; what the engine does not do is refused by name."""

import dataclasses

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.generation.requests import GenerationRequest
from frontend.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from frontend.structured_outputs import StructuredOutputsParams


def same_names(body: type[msgspec.Struct]) -> set[str]:
    """The sampling parameters that are fields of a body in the same form."""
    return {each.name for each in dataclasses.fields(SamplingParams)} & {*body.__struct_fields__}


_SAME_NAMES = same_names(GenerationRequest)


def sampling_params(
    llm: AsyncLLM,
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    constrained: StructuredOutputsParams | None,
) -> SamplingParams:
    """
    Args:
        max_tokens: None: as many as the model's length leaves.
        logprobs: how many of the likeliest tokens, beside the sampled one.
        constrained: what the text must be.

    Raises:
        ApiError: something that this server does not do.
        InvalidInput: values outside their limits.
    """
    _refuse_unsupported(request)
    same = {name: getattr(request, name) for name in _SAME_NAMES}
    given = {name: value for name, value in same.items() if value is not None}
    if request.repetition_detection is not None:
        fields = msgspec.structs.asdict(request.repetition_detection)
        given["repetition_detection"] = RepetitionDetectionParams(**fields)
    given |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "structured_outputs": constrained,
        "extra_args": request.vllm_xargs,
        "output_kind": RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    }
    return dataclasses.replace(llm.get_default_sampling_params(), **given)


def _refuse_unsupported(request: GenerationRequest) -> None:
    if request.stream and (request.best_of or 1) > (request.n or 1):
        what = f"best_of is {request.best_of}, and a stream has n of n samples; set stream=false"
        raise ApiError(400, what, param="best_of")
    if request.stream and request.prompt_logprobs:
        raise ApiError(
            400,
            f"prompt_logprobs is {request.prompt_logprobs}, and a stream has none; set "
            "stream=false",
            param="prompt_logprobs",
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
