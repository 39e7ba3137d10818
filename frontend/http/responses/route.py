"""POST /v1/responses, GET /v1/responses/{id}."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.answer_parts import AnswerFormat
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.event_stream import event, streamed, whole
from frontend.http.exchange import exchange_of
from frontend.http.generation.answers import TokenCounts, finish_reason
from frontend.http.generation.chat import chat_format, check_chat, generate_chat
from frontend.http.generation.requests import (
    ChatCompletionRequest,
    ChatMessage,
    FunctionDefinition,
    JsonSchemaFormat,
    ResponseFormat,
    Tool,
)
from frontend.http.operations import operation
from frontend.http.responses import bodies
from frontend.http.responses.input_items import append_items
from frontend.http.responses.store import ResponseStore, StoredResponse
from frontend.http.responses.writer import ResponseWriter
from frontend.http.served_models import served_models
from frontend.outputs import RequestOutput

_SAME_NAMES = (
    "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "user", "priority",
    "safety_identifier", "prompt_cache_key", "cache_salt", "chat_template_kwargs", "tool_choice",
    "parallel_tool_calls",
)  # fmt: skip
_MEDIA_TYPE = "application/json"


@operation(
    "POST",
    "/v1/responses",
    takes=bodies.ResponsesRequest,
    gives=bodies.ResponseObject,
    event=bodies.ResponseEvent,
)
async def create_response(request: Request, asked: bodies.ResponsesRequest) -> Response:
    """Answer a conversation with items, whole or as a stream of events."""
    _check(asked)
    conversation = _conversation(request, asked)
    chat = _chat_request(asked, conversation)
    check_chat(chat)
    llm = await served_models(request).get(asked.model)
    parts = chat_format(
        request,
        llm,
        chat,
        tool_field="tools[{}].parameters",
        format_field="text.format.schema",
    )
    outputs = await generate_chat(llm, chat, parts, exchange_of(request))
    writer = ResponseWriter(_response_object(asked, exchange_of(request).model, llm))

    def store() -> None:
        if asked.store is False:
            return
        items = msgspec.convert(msgspec.to_builtins(writer.response.output), list[bodies.InputItem])
        append_items(conversation, items)
        encode = msgspec.json.encode
        stored = StoredResponse(_owner(request), encode(writer.response), encode(conversation))
        responses: ResponseStore = request.app.state.responses
        responses.put(writer.response.id, stored)

    def events(
        outputs: AsyncGenerator[RequestOutput, None],
    ) -> AsyncGenerator[bodies.ResponseEvent, None]:
        return _events(outputs, parts, writer, store, streams_arguments=bool(asked.stream))

    if not asked.stream:
        await whole(request, events(outputs))
        return Response(msgspec.json.encode(writer.response), media_type=_MEDIA_TYPE)

    def failure(error: ApiError, _path: str) -> bytes:
        code = "invalid_prompt" if error.status < 500 else "server_error"
        code = "rate_limit_exceeded" if error.status == 429 else code
        return _encoded(writer.fail(code, error.message))

    return await streamed(
        request, outputs, lambda each: _encoded_events(writer, events(each)), failure
    )


@operation("GET", "/v1/responses/{response_id}", gives=bodies.ResponseObject)
async def get_response(request: Request) -> Response:
    """A response that was kept."""
    for name in request.query_params:
        raise ApiError(400, f"{name!r} is not supported; omit it", param=name)
    stored = _stored(request, request.path_params["response_id"], 404)
    return Response(stored.response, media_type=_MEDIA_TYPE)


def _check(asked: bodies.ResponsesRequest) -> None:
    kind = "text" if asked.text is None else asked.text.format.type
    if kind not in ("text", "json_object", "json_schema"):
        raise not_supported("text.format.type", kind, 'use "text", "json_object" or "json_schema"')


def _owner(request: Request) -> str | None:
    """None without keys: then all callers are one."""
    exchange = exchange_of(request)
    return None if exchange.key is None else exchange.caller


def _stored(request: Request, response_id: str, status: int) -> StoredResponse:
    responses: ResponseStore = request.app.state.responses
    stored = responses.get(response_id, _owner(request))
    if stored is None:
        raise ApiError(
            status,
            f"the response {response_id!r} is not kept here: it was not stored, or dropped for "
            "newer ones; send the conversation as input",
            param="previous_response_id" if status == 400 else "response_id",
            code="previous_response_not_found" if status == 400 else "not_found",
        )
    return stored


def _conversation(request: Request, asked: bodies.ResponsesRequest) -> list[ChatMessage]:
    """The conversation so far, without instructions."""
    messages: list[ChatMessage] = []
    if asked.previous_response_id is not None:
        stored = _stored(request, asked.previous_response_id, 400)
        messages = msgspec.json.decode(stored.messages, type=list[ChatMessage])
    if isinstance(asked.input, str):
        messages.append(ChatMessage(role="user", content=asked.input))
    else:
        append_items(messages, asked.input)
    if not messages:
        raise ApiError(400, "input is empty; give at least one message", param="input")
    return messages


def _chat_request(
    asked: bodies.ResponsesRequest, conversation: list[ChatMessage]
) -> ChatCompletionRequest:
    messages = [*conversation]
    if asked.instructions:
        messages.insert(0, ChatMessage(role="system", content=asked.instructions))
    tools = [
        Tool(function=msgspec.convert(each, FunctionDefinition, from_attributes=True))
        for each in asked.tools or ()
    ]
    same: dict[str, Any] = {name: getattr(asked, name) for name in _SAME_NAMES}
    return ChatCompletionRequest(
        messages=messages,
        model=asked.model,
        stream=True,
        max_completion_tokens=asked.max_output_tokens,
        tools=tools,
        response_format=_response_format(asked),
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        **same,
    )


def _response_format(asked: bodies.ResponsesRequest) -> ResponseFormat | None:
    if asked.text is None:
        return None
    given = asked.text.format
    schema = JsonSchemaFormat(name=given.name or "", schema_=given.schema_)
    return ResponseFormat(type=given.type, json_schema=schema)


def _response_object(
    asked: bodies.ResponsesRequest, model: str, llm: AsyncLLM
) -> bodies.ResponseObject:
    defaults = llm.get_default_sampling_params()
    return bodies.ResponseObject(
        id=f"resp_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        reasoning=asked.reasoning or bodies.ReasoningOptions(),
        store=asked.store is not False,
        temperature=defaults.temperature if asked.temperature is None else asked.temperature,
        text=asked.text or bodies.TextOptions(),
        tool_choice=asked.tool_choice or "auto",
        tools=asked.tools or [],
        top_p=defaults.top_p if asked.top_p is None else asked.top_p,
        user=asked.user,
        metadata=asked.metadata or {},
    )


async def _events(
    outputs: AsyncGenerator[RequestOutput, None],
    parts: AnswerFormat,
    writer: ResponseWriter,
    store: Callable[[], None],
    *,
    streams_arguments: bool,
) -> AsyncGenerator[bodies.ResponseEvent, None]:
    counts = TokenCounts()
    parser = None
    num_reasoning_tokens = 0
    async for output in outputs:
        counts.count(0, output)
        (part,) = output.outputs
        reason = finish_reason(part)
        parser = parser or parts.parser(output.prompt, streams_arguments=streams_arguments)
        for piece in parser.feed(part.text, at_end=part.finished()):
            for each in writer.add(piece):
                yield each
        num_reasoning_tokens += len(part.token_ids) if parser.is_reasoning else 0
        if reason is not None:
            for each in writer.end(reason, _usage(counts, num_reasoning_tokens)):
                if each.response is not msgspec.UNSET:
                    store()
                yield each


def _usage(counts: TokenCounts, num_reasoning_tokens: int) -> bodies.ResponseUsage:
    usage = counts.usage()
    return bodies.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=bodies.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=bodies.OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


async def _encoded_events(
    writer: ResponseWriter, events: AsyncGenerator[bodies.ResponseEvent, None]
) -> AsyncGenerator[bytes, None]:
    for each in writer.begin():
        yield _encoded(each)
    async for each in events:
        yield _encoded(each)


def _encoded(each: bodies.ResponseEvent) -> bytes:
    return event(each, each.type)
