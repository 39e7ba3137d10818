"""POST /v1/messages and /v1/messages/count_tokens."""

import itertools
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.errors import InvalidInput
from frontend.http.answer_parts import AnswerFormat, AnswerParser, thinking_variables
from frontend.http.anthropic import bodies
from frontend.http.anthropic.blocks import BlockEvents, whole_blocks
from frontend.http.anthropic.conversation import chat_request
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.event_stream import EventStream, event, json_response, streamed, whole
from frontend.http.exchange import exchange_of
from frontend.http.generation.answers import EngineFailure, TokenCounts, finish_reason
from frontend.http.generation.chat import chat_format, check_chat, generate_chat
from frontend.http.generation.requests import ChatCompletionRequest
from frontend.http.generation.tokenize import TokenizeRequest, tokens_of
from frontend.http.operations import operation
from frontend.http.served_models import served_models
from frontend.outputs import RequestOutput
from frontend.wire_params import thinking_budget

_OTHER_EVENTS = "2023-01-01"
"""A version of the API; all later ones have the events that are sent here."""
_SESSION = "x-claude-code-session-id"
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Levels of effort that stand for those which a template does not name."""


@operation(
    "POST",
    "/v1/messages",
    takes=bodies.MessagesRequest,
    gives=bodies.Message,
    event=bodies.MessageEvent,
)
async def messages(request: Request, asked: bodies.MessagesRequest) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    _check_version(request)
    llm = await served_models(request).get(asked.model)
    chat, parts = _chat(request, llm, asked)
    for name in ("max_tokens", "stream", "temperature", "top_p", "top_k", "vllm_xargs"):
        setattr(chat, name, getattr(asked, name))
    chat.stop = asked.stop_sequences
    chat.user = None if asked.metadata is None else asked.metadata.user_id
    chat.prompt_cache_key = request.headers.get(_SESSION)
    chat.thinking_token_budget = _thinking_budget(llm, asked)
    outputs = await generate_chat(llm, chat, parts, exchange_of(request))
    answer = _Answer(asked, llm.model.block_size)
    if asked.stream:
        stream = await streamed(
            request, outputs, lambda each: _events(each, answer, parts), form=_PingedStream
        )
        return answer.identified(stream)
    output = await whole(request, outputs)
    answer.count(0, output)
    parser = parts.parser(output.prompt)
    found = parser.feed(output.outputs[0].text, at_end=True)
    blocks = whole_blocks(found, omits_thinking=answer.omits_thinking)
    return answer.identified(json_response(answer.message(blocks, answer.stop(output, parser))))


@operation(
    "POST", "/v1/messages/count_tokens", takes=bodies.CountTokensRequest, gives=bodies.TokenCount
)
async def count_tokens(request: Request, asked: bodies.CountTokensRequest) -> Response:
    """The number of tokens of a conversation."""
    _check_version(request)
    llm = await served_models(request).get(asked.model)
    chat, parts = _chat(request, llm, asked)
    tokenized = TokenizeRequest(
        messages=chat.messages,
        tools=chat.tools if parts.tools_in_prompt else None,
        continue_final_message=chat.continue_final_message,
        chat_template_kwargs=chat.chat_template_kwargs,
    )
    return json_response(bodies.TokenCount(input_tokens=len(await tokens_of(tokenized, llm))))


def _check_version(request: Request) -> None:
    if request.headers.get("anthropic-version") == _OTHER_EVENTS:
        raise not_supported("anthropic-version", _OTHER_EVENTS, "use 2023-06-01 or a later one")


def _chat(
    request: Request, llm: AsyncLLM, asked: bodies.CountTokensRequest
) -> tuple[ChatCompletionRequest, AnswerFormat]:
    """
    Raises:
        ApiError: the model does not do what is asked for.
    """
    thinks = asked.thinking is not None and asked.thinking.type != "disabled"
    chat = chat_request(asked)
    has_tools = bool(chat.tools)
    chat.chat_template_kwargs = {
        **thinking_variables(llm, thinks=thinks, has_tools=has_tools),
        **_effort(llm, asked, has_tools=has_tools),
    }
    check_chat(chat)
    parts = chat_format(
        request,
        llm,
        chat,
        tool_field="tools[{}].input_schema",
        format_field="output_config.format.schema",
    )
    must_think = asked.thinking is not None and asked.thinking.type == "enabled"
    if parts.reasoning is None and must_think:
        raise ApiError(400, 'this model does not think; use "disabled"', param="thinking.type")
    return chat, parts


def _effort(llm: AsyncLLM, asked: bodies.CountTokensRequest, *, has_tools: bool) -> dict[str, Any]:
    """The variable of the chat template that says how much to reason, if it has one."""
    effort = None if asked.output_config is None else asked.output_config.effort
    template = llm.get_tokenizer().used_template(None, has_tools=has_tools) or ""
    if effort is None or "reasoning_effort" not in template:
        return {}
    is_known = any(f"{mark}{effort}{mark}" in template for mark in "'\"")
    return {"reasoning_effort": effort if is_known else _EFFORTS.get(effort, effort)}


def _caches(asked: bodies.MessagesRequest) -> bool:
    """Whether anything of it is marked to be cached."""
    lists = [asked.tools, asked.system, *(each.content for each in asked.messages)]
    marked = itertools.chain([asked], *(each for each in lists if isinstance(each, list)))
    return any(each.cache_control is not None for each in marked)


def _thinking_budget(llm: AsyncLLM, asked: bodies.MessagesRequest) -> int | None:
    """The most tokens of thinking. None: it is the answer's own limit, or this model's marks of
    thinking are of several tokens, so that it ends by itself."""
    budget = None if asked.thinking is None else asked.thinking.budget_tokens
    if budget is None or budget >= asked.max_tokens - 1:
        return None
    try:
        thinking_budget(budget, llm.get_tokenizer())
    except InvalidInput:
        return None
    return budget


def _sent(body: Any) -> bytes:
    return event(body, body.__struct_config__.tag)


class _PingedStream(EventStream):
    comment = _sent(bodies.Ping())


class _Answer(TokenCounts):
    """One message: its id, its usage, and why it ended.

    Args:
        block_size: tokens of a block of the prefix cache.
    """

    def __init__(self, asked: bodies.MessagesRequest, block_size: int) -> None:
        super().__init__()
        self._asked = asked
        self._block_size = block_size if _caches(asked) else 0
        self.omits_thinking = asked.thinking is not None and asked.thinking.display == "omitted"

    def identified(self, response: Response) -> Response:
        """With the header in which Anthropic's clients look for the request's id."""
        response.headers["request-id"] = self._exchange.request_id
        return response

    def message_usage(self) -> bodies.MessageUsage:
        usage = self.usage()
        num_cached, num_written = usage.prompt_tokens_details.cached_tokens, 0
        if self._block_size:
            num_written = usage.prompt_tokens // self._block_size * self._block_size - num_cached
        return bodies.MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached - max(0, num_written),
            cache_creation_input_tokens=max(0, num_written),
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
        )

    def message(
        self, content: list[bodies.AnswerBlock], stop: bodies.StopDelta | None = None
    ) -> bodies.Message:
        return bodies.Message(
            id=f"msg_{self._exchange.request_id}",
            model=self._asked.model,
            content=content,
            stop_reason=None if stop is None else stop.stop_reason,
            stop_sequence=None if stop is None else stop.stop_sequence,
            usage=self.message_usage(),
        )

    def stop(self, output: RequestOutput, parser: AnswerParser) -> bodies.StopDelta:
        """
        Raises:
            EngineFailure: it ended neither by the model nor by a limit of its own.
        """
        part = output.outputs[0]
        match finish_reason(part):
            case "stop" if isinstance(part.stop_reason, str):
                return bodies.StopDelta(stop_reason="stop_sequence", stop_sequence=part.stop_reason)
            case "stop":
                reason = "tool_use" if parser.num_calls else "end_turn"
            case "length" if self._num_generated < self._asked.max_tokens:
                reason = "model_context_window_exceeded"
            case "length":
                reason = "max_tokens"
            case other:
                raise EngineFailure(part.detail or f"the engine ended the request: {other}")
        return bodies.StopDelta(stop_reason=reason, stop_sequence=None)


async def _events(
    outputs: AsyncGenerator[RequestOutput, None], answer: _Answer, parts: AnswerFormat
) -> AsyncGenerator[bytes, None]:
    blocks = BlockEvents(omits_thinking=answer.omits_thinking)
    parser: AnswerParser | None = None
    async for output in outputs:
        answer.count(0, output)
        if parser is None:
            parser = parts.parser(output.prompt, streams_arguments=True)
            yield _sent(bodies.MessageStart(message=answer.message([])))
        for part in parser.feed(output.outputs[0].text, at_end=output.finished):
            for made in blocks.feed(part):
                yield _sent(made)
        if output.finished:
            stop = answer.stop(output, parser)
            for made in blocks.close():
                yield _sent(made)
            yield _sent(bodies.MessageDelta(delta=stop, usage=answer.message_usage()))
            yield _sent(bodies.MessageStop())
