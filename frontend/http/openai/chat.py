"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.caller import Caller
from frontend.http.event_stream import (
    DONE,
    EventStream,
    decode,
    ending_with_errors,
    event,
    json_response,
    until_disconnect,
    with_first,
)
from frontend.http.openai.generation import Answer, finish_reason, token_logprobs
from frontend.http.openai.parameters import sampling_params
from frontend.http.openai.requests import ChatCompletionRequest
from frontend.http.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
)
from frontend.http.served_models import ServedModels
from frontend.outputs import CompletionOutput, RequestOutput

_decoder = msgspec.json.Decoder(ChatCompletionRequest)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    models: ServedModels = request.app.state.models
    asked: ChatCompletionRequest = decode(_decoder, await request.body())
    _check(asked)
    model, llm = await models.get(asked.model)
    outputs = _generate(llm, asked, Caller.of(request))
    answer = Answer("chatcmpl", asked.request_id, asked.stream_options)
    name = asked.model or model.names[0]
    if asked.stream:
        started = await until_disconnect(request, with_first(outputs))
        if started is None:
            return Response(status_code=499)
        _, outputs = started
        events = _events(outputs, answer, name, asked, llm)
        return EventStream(ending_with_errors(events))
    output = await until_disconnect(request, _last(outputs))
    if output is None:
        return Response(status_code=499)
    answer.count(0, output)
    choices = [_choice(part, asked, llm) for part in output.outputs]
    return json_response(
        ChatCompletion(
            id=answer.id,
            created=answer.created_s,
            model=name,
            choices=choices,
            usage=answer.usage(),
        ),
    )


def _check(asked: ChatCompletionRequest) -> None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if asked.tool_choice not in (None, "none", "auto"):
        raise not_supported("tool_choice", asked.tool_choice, 'use "auto" or "none"')
    if asked.modalities not in (None, ["text"]):
        raise not_supported("modalities", asked.modalities, 'use ["text"]')
    if asked.parallel_tool_calls is False:
        raise not_supported("parallel_tool_calls", False, "omit it, and use the first call")


def _generate(
    llm: AsyncLLM, asked: ChatCompletionRequest, caller: Caller
) -> AsyncGenerator[RequestOutput, None]:
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    params = sampling_params(llm, asked, max_tokens=max_tokens, logprobs=num_logprobs)
    messages: list[dict[str, Any]] = [
        {
            name: value
            for name, value in msgspec.structs.asdict(message).items()
            if value is not None
        }
        for message in asked.messages
    ]
    return llm.chat(
        messages,
        params,
        caller.engine_request_id(),
        chat_template=asked.chat_template,
        add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
        continue_final_message=asked.continue_final_message,
        tools=None if asked.tool_choice == "none" else asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        priority=caller.priority(asked.priority),
        tenant=caller.tenant(asked.user),
        cache_salt=asked.cache_salt,
    )


async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return [output async for output in outputs][-1]


def _choice(output: CompletionOutput, asked: ChatCompletionRequest, llm: AsyncLLM) -> ChatChoice:
    return ChatChoice(
        index=output.index,
        message=AnswerMessage(content=output.text),
        logprobs=_logprobs(output, asked, llm),
        finish_reason=finish_reason(output),
        stop_reason=output.stop_reason,
        token_ids=output.token_ids if asked.return_token_ids else UNSET,
    )


def _logprobs(
    output: CompletionOutput, asked: ChatCompletionRequest, llm: AsyncLLM
) -> ChatLogprobs | None:
    if not asked.logprobs or output.logprobs is None:
        return None
    tokenizer = llm.get_tokenizer()
    return ChatLogprobs(
        token_logprobs(output.token_ids, output.logprobs, asked.top_logprobs or 0, tokenizer)
    )


async def _events(
    outputs: AsyncGenerator[RequestOutput, None],
    answer: Answer,
    name: str,
    asked: ChatCompletionRequest,
    llm: AsyncLLM,
) -> AsyncGenerator[bytes, None]:
    def chunk(choices: list[ChatChunkChoice], usage: Any) -> bytes:
        return event(
            ChatCompletionChunk(
                id=answer.id, created=answer.created_s, model=name, choices=choices, usage=usage
            )
        )

    no_usage = None if answer.includes_usage else UNSET
    for index in range(asked.n or 1):
        first = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        yield chunk([first], no_usage)
    async for output in outputs:
        answer.count(0, output)
        for part in output.outputs:
            choice = ChatChunkChoice(
                index=part.index,
                delta=Delta(content=part.text) if part.text else Delta(),
                logprobs=_logprobs(part, asked, llm),
                finish_reason=finish_reason(part),
                stop_reason=UNSET if part.stop_reason is None else part.stop_reason,
                token_ids=part.token_ids if asked.return_token_ids else UNSET,
            )
            yield chunk([choice], answer.usage_so_far() or no_usage)
    if answer.includes_usage:
        yield chunk([], answer.usage())
    yield DONE
