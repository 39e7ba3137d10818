"""POST /v1/responses."""

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.errors import PromptTooLong
from frontend.http.answer_parts import AnswerFormat
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.event_stream import EventStream, event, streamed, whole
from frontend.http.exchange import exchange_of
from frontend.http.generation.chat import chat_format, check_chat, generate_chat
from frontend.http.generation.requests import (
    ChatCompletionRequest,
    ChatMessage,
    JsonSchemaFormat,
    ResponseFormat,
)
from frontend.http.mcp.routes import check_origin
from frontend.http.mcp.servers import tool_servers
from frontend.http.operations import operation
from frontend.http.responses import bodies
from frontend.http.responses.answering import Answering, Events, Keep
from frontend.http.responses.background import BackgroundRun, failed_event
from frontend.http.responses.input_items import conversation_of, with_one_system_message
from frontend.http.responses.reasoning import reasoning_of, without_old_reasoning
from frontend.http.responses.server_tools import ServerTools
from frontend.http.responses.store import StoredResponse
from frontend.http.responses.stored import runs_of, store_of, stored_response
from frontend.http.responses.tools import OfferedTools
from frontend.http.responses.truncation import Outputs, fitted
from frontend.http.responses.writer import ResponseWriter, item_id
from frontend.http.served_models import served_models
from frontend.http.settings import ServerSettings

_SAME_NAMES = (
    "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "user", "priority",
    "safety_identifier", "prompt_cache_key", "cache_salt", "parallel_tool_calls",
)  # fmt: skip
_MEDIA_TYPE = "application/json"
_LOGPROBS = "message.output_text.logprobs"


@operation(
    "POST",
    "/v1/responses",
    takes=bodies.ResponsesRequest,
    gives=bodies.ResponseObject,
    event=bodies.ResponseEvent,
)
async def create_response(request: Request, asked: bodies.ResponsesRequest) -> Response:
    """Answer a conversation with items, whole, as a stream of events, or in the background."""
    _check(request, asked)
    items, num_before = await _conversation(request, asked)
    settings: ServerSettings = request.app.state.settings
    tools = OfferedTools(settings.unknown_tools == "refuse", servers=tool_servers(request))
    messages = conversation_of(items, tools.pass_over)
    llm = await served_models(request).get(asked.model)
    tools.add_all(asked.tools or ())
    for number, item in enumerate(items):
        if item.type in ("additional_tools", "tool_search_output"):
            tools.add_all(item.tools or (), f"input[{number}].tools")
    reasoning, level, variables = reasoning_of(llm, asked, has_tools=bool(tools.functions))
    exchange = exchange_of(request)

    async def generate(
        messages: list[ChatMessage], choice: Literal["auto", "none"] | None = None
    ) -> tuple[AnswerFormat, Outputs]:
        chat = _chat_request(asked, messages, tools)
        chat.reasoning_effort, chat.chat_template_kwargs = level, variables or None
        if choice is not None:
            chat.tool_choice = choice
        check_chat(chat)
        parts = chat_format(
            request, llm, chat, tool_field=tools.fields, format_field="text.format.schema"
        )
        outputs = await generate_chat(llm, chat, parts, exchange)
        if asked.truncation == "auto":
            outputs = fitted(outputs, chat, lambda chat: generate_chat(llm, chat, parts, exchange))
        return parts, outputs

    if tools.asked_servers:
        check_origin(request)
    parts, outputs = await generate(messages)
    server_tools = ServerTools(tools.asked_servers, items, asked.max_tool_calls, generate)
    if await server_tools.run_approved(num_before):
        await outputs.aclose()
        parts, outputs = await server_tools.generate()
    response = _response_object(asked, exchange.model, llm, reasoning)
    for number, item in enumerate(items[num_before:], num_before):
        item.id = item.id or item_id("msg", response.id, number)
    include = asked.include or ()
    writer = ResponseWriter(
        response,
        tools.forms,
        first_number=len(items),
        seals_reasoning="reasoning.encrypted_content" in include,
    )
    num_top = (asked.top_logprobs or 0) if _LOGPROBS in include else None
    answering = Answering(
        llm,
        parts,
        writer,
        streams=bool(asked.stream),
        num_top=num_top,
        server_tools=server_tools,
    )

    async def keep(events: list[bytes] | None = None) -> None:
        if asked.store is not False:
            kept = b",".join(map(_encoded_item, [*items, *response.output]))
            encoded = msgspec.json.encode(response)
            stored = StoredResponse(encoded, b"[" + kept + b"]", num_before, events)
            await store_of(request).put(response.id, exchange_of(request).owner, stored)

    if asked.background:
        run = BackgroundRun(
            exchange_of(request).owner,
            writer,
            keep,
            streams=bool(asked.stream),
            unread_timeout_s=_unread_timeout_s(asked),
        )
        queued = msgspec.json.encode(response)
        runs_of(request).start(run, answering.begun_events(outputs), exchange)
        if asked.stream:
            return EventStream(run.follow())
        return Response(queued, media_type=_MEDIA_TYPE)
    if asked.stream:
        return await _streamed(request, answering, outputs, keep)
    await whole(request, answering.events(outputs, keep))
    return Response(msgspec.json.encode(response), media_type=_MEDIA_TYPE)


async def _streamed(
    request: Request, answering: Answering, outputs: Outputs, keep: Keep
) -> Response:
    """A prompt that is too long is the stream's last event, not a status, as OpenAI has it:
    agents look for it there."""
    writer = answering.writer

    async def encoded(events: Events) -> AsyncGenerator[bytes, None]:
        async for each in events:
            yield event(each, each.type)

    async def failing(error: PromptTooLong) -> Events:
        for each in (*writer.begin(), failed_event(writer, error)):
            yield each

    def last_event(error: ApiError, _path: str) -> bytes:
        failed = failed_event(writer, error)
        return event(failed, failed.type)

    try:
        return await streamed(
            request,
            outputs,
            lambda outputs: encoded(answering.begun_events(outputs, keep)),
            last_event,
        )
    except PromptTooLong as error:
        return EventStream(encoded(failing(error)))


def _check(request: Request, asked: bodies.ResponsesRequest) -> None:
    kind = "text" if asked.text is None else asked.text.format.type
    if kind not in ("text", "json_object", "json_schema"):
        raise not_supported("text.format.type", kind, 'use "text", "json_object" or "json_schema"')
    if _unread_timeout_s(asked) is not None and not (asked.background and asked.stream):
        field = "background_options.unread_timeout"
        raise ApiError(400, f"{field} needs background and stream", param=field)
    if asked.background:
        if asked.store is False:
            what = "background needs store; omit store, or background"
            raise ApiError(400, what, param="background")
        key = exchange_of(request).key
        most = None if key is None else key.max_concurrent_requests
        runs_of(request).check(exchange_of(request).owner, most)


def _unread_timeout_s(asked: bodies.ResponsesRequest) -> float | None:
    options = asked.background_options
    return None if options is None else options.unread_timeout


async def _conversation(
    request: Request, asked: bodies.ResponsesRequest
) -> tuple[list[bodies.InputItem], int]:
    """All items so far, and how many of them belong to responses before this one."""
    items: list[bodies.InputItem] = []
    if asked.previous_response_id is not None:
        stored = await stored_response(request, asked.previous_response_id, 400)
        items = msgspec.json.decode(stored.items, type=list[bodies.InputItem])
    num_before = len(items)
    if isinstance(asked.input, str):
        return [*items, bodies.InputItem(role="user", content=asked.input)], num_before
    for item in asked.input:
        kept = None
        if item.type == "item_reference" and item.id is not None:
            kept = await store_of(request).item(item.id, exchange_of(request).owner)
        items.append(item if kept is None else msgspec.json.decode(kept, type=bodies.InputItem))
    if not items:
        raise ApiError(400, "input is empty; give at least one message", param="input")
    return items, num_before


def _chat_request(
    asked: bodies.ResponsesRequest, messages: list[ChatMessage], tools: OfferedTools
) -> ChatCompletionRequest:
    if asked.instructions:
        messages.insert(0, ChatMessage(role="system", content=asked.instructions))
    if asked.reasoning is not None and asked.reasoning.context == "current_turn":
        without_old_reasoning(messages)
    same: dict[str, Any] = {name: getattr(asked, name) for name in _SAME_NAMES}
    same["tool_choice"] = tools.choice(asked.tool_choice)
    has_logprobs = _LOGPROBS in (asked.include or ())
    return ChatCompletionRequest(
        messages=with_one_system_message(messages),
        model=asked.model,
        stream=True,
        max_completion_tokens=asked.max_output_tokens,
        tools=tools.functions,
        response_format=_response_format(asked),
        logprobs=has_logprobs,
        top_logprobs=asked.top_logprobs if has_logprobs else None,
        **same,
    )


def _response_format(asked: bodies.ResponsesRequest) -> ResponseFormat | None:
    if asked.text is None:
        return None
    given = asked.text.format
    schema = JsonSchemaFormat(name=given.name or "", schema_=given.schema_)
    return ResponseFormat(type=given.type, json_schema=schema)


def _response_object(
    asked: bodies.ResponsesRequest,
    model: str,
    llm: AsyncLLM,
    reasoning: bodies.ReasoningOptions,
) -> bodies.ResponseObject:
    defaults = llm.get_default_sampling_params()
    return bodies.ResponseObject(
        id=f"resp_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        status="queued" if asked.background else "in_progress",
        background=bool(asked.background),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        prompt_cache_key=asked.prompt_cache_key,
        reasoning=reasoning,
        safety_identifier=asked.safety_identifier,
        store=asked.store is not False,
        temperature=defaults.temperature if asked.temperature is None else asked.temperature,
        text=asked.text or bodies.TextOptions(),
        tool_choice=asked.tool_choice or "auto",
        tools=asked.tools or [],
        top_logprobs=asked.top_logprobs or 0,
        top_p=defaults.top_p if asked.top_p is None else asked.top_p,
        truncation=asked.truncation or "disabled",
        user=asked.user,
        metadata=asked.metadata or {},
    )


def _encoded_item(item: bodies.InputItem | bodies.OutputItem) -> bytes:
    """As it is listed: with its type, and a message's content in parts."""
    found: dict[str, Any] = msgspec.to_builtins(item)
    found.setdefault("type", "message")
    if found["type"] == "message" and isinstance(text := found.get("content"), str):
        kind = "output_text" if found.get("role") == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": text}]
        found.setdefault("status", "completed")
    return msgspec.json.encode(found)
