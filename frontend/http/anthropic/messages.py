"""POST /v1/messages and /v1/messages/count_tokens."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.answer_parts import AnswerFormat, AnswerParser, answer_format, thinking_variables
from frontend.http.anthropic import bodies
from frontend.http.anthropic.blocks import BlockEvents, whole_blocks
from frontend.http.anthropic.conversation import continues_answer, template_messages, template_tools
from frontend.http.api_errors import ApiError, error_body, not_supported
from frontend.http.event_stream import event, json_response, streamed, whole
from frontend.http.exchange import exchange_of
from frontend.http.generation.answers import EngineFailure, TokenCounts, finish_reason
from frontend.http.operations import operation
from frontend.http.served_models import ServedModels
from frontend.http.tools.grammar import OfferedTool, chosen_tool
from frontend.outputs import RequestOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams
from frontend.structured_outputs import StructuredOutputsParams

_OTHER_EVENTS = "2023-01-01"
"""A version of the API; all later ones have the events that are sent here."""


@operation(
    "POST",
    "/v1/messages",
    takes=bodies.MessagesRequest,
    gives=bodies.Message,
    event=bodies.MessageEvent,
)
async def messages(request: Request, asked: bodies.MessagesRequest) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    models: ServedModels = request.app.state.models
    _check_version(request)
    _, llm = await models.get(asked.model)
    parts = _answer_format(request, llm, asked)
    user = None if asked.metadata is None else asked.metadata.user_id
    outputs = llm.chat(
        template_messages(asked),
        _sampling_params(llm, asked, parts),
        **_template_options(llm, asked, parts),
        **exchange_of(request).generates_as(user),
    )
    answer = _Answer(asked)
    if asked.stream:
        stream = await streamed(
            request, outputs, lambda each: _events(each, answer, parts), _error_event
        )
        return answer.identified(stream)
    output = await whole(request, outputs)
    answer.count(0, output)
    parser = parts.parser(output.prompt)
    blocks = whole_blocks(parser.feed(output.outputs[0].text, at_end=True))
    return answer.identified(json_response(answer.message(blocks, answer.stop(output, parser))))


@operation(
    "POST", "/v1/messages/count_tokens", takes=bodies.CountTokensRequest, gives=bodies.TokenCount
)
async def count_tokens(request: Request, asked: bodies.CountTokensRequest) -> Response:
    """The number of tokens of a conversation."""
    models: ServedModels = request.app.state.models
    _check_version(request)
    _, llm = await models.get(asked.model)
    parts = _answer_format(request, llm, asked)
    options = _template_options(llm, asked, parts)
    variables = options.pop("chat_template_kwargs")
    prompt = await llm.chat_prompt(template_messages(asked), is_cut=True, **options, **variables)
    return json_response(bodies.TokenCount(input_tokens=len(prompt["prompt_token_ids"])))


def _check_version(request: Request) -> None:
    if request.headers.get("anthropic-version") == _OTHER_EVENTS:
        raise not_supported("anthropic-version", _OTHER_EVENTS, "use 2023-06-01 or a later one")


def _thinks(asked: bodies.CountTokensRequest) -> bool:
    return asked.thinking is not None and asked.thinking.type != "disabled"


def _answer_format(
    request: Request, llm: AsyncLLM, asked: bodies.CountTokensRequest
) -> AnswerFormat:
    """
    Raises:
        ApiError: the model does not do what is asked for.
    """
    choice = asked.tool_choice
    kind = "auto" if choice is None else choice.type
    tools = [
        OfferedTool(
            tool.name,
            tool.input_schema,
            tool.strict is True,
            field=f"tools[{number}].input_schema",
        )
        for number, tool in enumerate(asked.tools or ())
        if kind != "none"
    ]
    if choice is not None and kind == "tool":
        tools = chosen_tool(tools, str(choice.name))
    if kind == "any" and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    parts = answer_format(
        request,
        llm,
        None,
        tools=tools,
        must_call=kind in ("any", "tool"),
        constrained=_constrained(asked),
        has_one_call=kind == "tool"
        or (choice is not None and choice.disable_parallel_tool_use is True),
    )
    if parts.reasoning is None and _thinks(asked):
        raise ApiError(400, 'this model does not think; use "disabled"', param="thinking.type")
    return parts


def _constrained(asked: bodies.CountTokensRequest) -> StructuredOutputsParams | None:
    config = asked.output_config
    if config is None or config.format is None:
        return None
    return StructuredOutputsParams(json=config.format.schema_, field="output_config.format.schema")


def _template_options(
    llm: AsyncLLM, asked: bodies.CountTokensRequest, parts: AnswerFormat
) -> dict[str, Any]:
    continues = continues_answer(asked)
    tools = template_tools(asked) if parts.tools_in_prompt else None
    return {
        "tools": tools,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "chat_template_kwargs": thinking_variables(
            llm, thinks=_thinks(asked), has_tools=bool(tools)
        ),
    }


def _sampling_params(
    llm: AsyncLLM, asked: bodies.MessagesRequest, parts: AnswerFormat
) -> SamplingParams:
    given = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k")}
    return dataclasses.replace(
        llm.get_default_sampling_params(),
        **{name: value for name, value in given.items() if value is not None},
        stop=asked.stop_sequences,
        structured_outputs=parts.structured_outputs,
        extra_args=asked.vllm_xargs,
        max_tokens=asked.max_tokens,
        skip_special_tokens=not parts.shows_special_tokens,
        output_kind=RequestOutputKind.DELTA if asked.stream else RequestOutputKind.FINAL_ONLY,
    )


class _Answer(TokenCounts):
    """One message: its id, its usage, and why it ended."""

    def __init__(self, asked: bodies.MessagesRequest) -> None:
        super().__init__()
        self._asked = asked

    def identified(self, response: Response) -> Response:
        """With the header in which Anthropic's clients look for the request's id."""
        response.headers["request-id"] = self._exchange.request_id
        return response

    def message_usage(self) -> bodies.MessageUsage:
        usage = self.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return bodies.MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
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


def _sent(body: Any) -> bytes:
    return event(body, bodies.named(body))


def _error_event(error: ApiError) -> bytes:
    return _sent(error_body(error, "/v1/messages"))


async def _events(
    outputs: AsyncGenerator[RequestOutput, None], answer: _Answer, parts: AnswerFormat
) -> AsyncGenerator[bytes, None]:
    blocks = BlockEvents()
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
