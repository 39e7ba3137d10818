"""POST /inference/v1/generate: tokens in, tokens out; and what chats and completions are rendered
to, which it takes."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import built, json_response, streamed, whole
from frontend.http.exchange import exchange_of
from frontend.http.generation.answer_bodies import ChatLogprobs, PromptLogprobList, Usage
from frontend.http.generation.answers import (
    CompletionAnswer,
    check_size,
    finish_reason,
    num_logprobs,
    prompt_logprobs,
    token_logprobs,
)
from frontend.http.generation.parameters import same_names, sampling_params
from frontend.http.generation.requests import (
    GenerationRequest,
    StreamOptions,
    StructuredOutputsFields,
)
from frontend.http.generation.structured_outputs import structured_outputs
from frontend.http.operations import operation
from frontend.http.served_models import served_models
from frontend.outputs import CompletionOutput, RequestOutput
from frontend.sampling_params import SamplingParams

_NAMES = same_names(GenerationRequest) - {"truncate_prompt_tokens"}
_FIELDS = [each for each in msgspec.structs.fields(GenerationRequest) if each.name in _NAMES]

SamplingFields = msgspec.defstruct(
    "SamplingFields",
    [
        *((each.name, each.type, None) for each in _FIELDS),
        ("logprobs", Annotated[int, Meta(ge=0)] | None, None),
        ("extra_args", dict[str, Any] | None, None),
    ],
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
)


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """POST /inference/v1/generate."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: SamplingFields  # type: ignore[valid-type]
    """`max_tokens` is what the model's length leaves, unless given."""
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    prompt: str | None = None
    """The tokens' text, where they were rendered. Not read."""


class TokensChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TokensAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer; in a stream each event is one, with the tokens that are new."""

    id: str
    request_id: str
    object: Literal["generate"] = "generate"
    created: int
    model: str
    choices: list[TokensChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


@operation(
    "POST",
    "/inference/v1/generate",
    takes=GenerateRequest,
    gives=TokensAnswer,
    event=TokensAnswer,
)
async def generate(request: Request, asked: GenerateRequest) -> Response:
    """Continue tokens with tokens, whole or as a stream of events."""
    llm = await served_models(request).get(asked.model)
    fields: Any = asked.sampling_params
    shared = GenerationRequest(
        stream=asked.stream,
        stream_options=asked.stream_options,
        request_id=asked.request_id,
        vllm_xargs=fields.extra_args,
        **{name: getattr(fields, name) for name in _NAMES},
    )
    params = sampling_params(
        llm,
        shared,
        max_tokens=fields.max_tokens,
        logprobs=fields.logprobs,
        constrained=structured_outputs(shared),
    )
    params = dataclasses.replace(params, detokenize=bool(params.stop_strings))
    exchange = exchange_of(request)
    outputs = llm.generate(
        {"prompt_token_ids": asked.token_ids},
        params,
        cache_salt=asked.cache_salt,
        **exchange.generates_as(None, asked.priority),
    )
    answer = CompletionAnswer("generate-tokens", shared)
    more: dict[str, Any] = {"request_id": asked.request_id or exchange.request_id}
    if asked.stream:
        return await streamed(request, outputs, lambda each: _events(each, answer, params, more))
    output = await whole(request, outputs)
    answer.count(0, output)

    def make() -> Response:
        if (found := output.prompt_logprobs) is not None:
            more["prompt_logprobs"] = prompt_logprobs(found)
        choices = [_choice(part, params) for part in output.outputs]
        return json_response(answer.body(TokensAnswer, choices, answer.usage(), **more))

    return await built(make, check_size(num_logprobs(output)))


def _choice(part: CompletionOutput, params: SamplingParams) -> TokensChoice:
    logprobs = None
    if part.logprobs is not None and params.logprobs is not None:
        found = token_logprobs(part.token_ids, part.logprobs, params.logprobs, None)
        logprobs = ChatLogprobs(found)
    return TokensChoice(
        index=part.index,
        token_ids=part.token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason(part),
        stop_reason=part.stop_reason,
    )


async def _events(
    outputs: AsyncGenerator[RequestOutput, None],
    answer: CompletionAnswer,
    params: SamplingParams,
    more: dict[str, Any],
) -> AsyncGenerator[bytes, None]:
    async for output in outputs:
        answer.count(0, output)

        def make(output: RequestOutput = output) -> bytes:
            choices = [_choice(part, params) for part in output.outputs]
            return answer.event(TokensAnswer, choices, **more)

        yield await built(make, num_logprobs(output))
    yield answer.end(TokensAnswer, **more)


async def rendered(
    llm: AsyncLLM, asked: GenerationRequest, prompt: object, params: SamplingParams
) -> GenerateRequest:
    """What `generate` would be asked for the same answer.

    Raises:
        ApiError, InvalidInput: it cannot be said in tokens, or not be served.
    """
    request = await llm.make_request(prompt, params)
    if request.wire.multimodal_inputs or request.wire.prompt_embeds:
        what = "a prompt with images, sounds or hidden states is more than tokens; send text"
        raise ApiError(400, what, param="prompt")
    given = {name: getattr(params, name) for name in (*_NAMES, "logprobs", "extra_args")}
    given = {k: v for k, v in given.items() if not (v is None or v is False or v == [])}
    if (constrained := params.structured_outputs) is not None:
        assert not isinstance(constrained, dict)
        if constrained.reasoning is not None:
            what = "a format behind reasoning, or of forced tools, is more than tokens; omit it"
            raise ApiError(400, what, param="response_format")
        names = StructuredOutputsFields.__struct_fields__
        given["structured_outputs"] = {
            name: value for name in names if (value := getattr(constrained, name))
        }
    if params.repetition_detection is not None:
        given["repetition_detection"] = dataclasses.asdict(params.repetition_detection)
    return GenerateRequest(
        token_ids=request.wire.prompt_token_ids,
        sampling_params=msgspec.convert(given, SamplingFields),
        model=asked.model,
        stream=asked.stream,
        stream_options=asked.stream_options,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        request_id=asked.request_id,
        prompt=request.prompt_text,
    )
