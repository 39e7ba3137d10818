"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.answer_parts import AnswerFormat, AnswerParser, Reasoning
from frontend.http.event_stream import TextEvents, built, json_response, streamed, whole
from frontend.http.exchange import exchange_of
from frontend.http.generation.answer_bodies import (
    AnswerMessage,
    AnswerToolCall,
    CallFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
)
from frontend.http.generation.answers import (
    CompletionAnswer,
    check_size,
    finish_reason,
    num_logprobs,
    prompt_logprobs,
    token_logprobs,
)
from frontend.http.generation.chat import chat_call, chat_format, check_chat, generate_chat
from frontend.http.generation.requests import ChatCompletionRequest
from frontend.http.openai.token_ids import GenerateRequest, rendered
from frontend.http.operations import operation
from frontend.http.served_models import served_models
from frontend.http.tools.calls import ArgumentsDelta, ToolCall
from frontend.outputs import CompletionOutput, RequestOutput

_NOTHING = Delta()


@operation(
    "POST",
    "/v1/chat/completions",
    takes=ChatCompletionRequest,
    gives=ChatCompletion,
    event=ChatCompletionChunk,
)
async def chat_completions(request: Request, asked: ChatCompletionRequest) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    check_chat(asked)
    llm = await served_models(request).get(asked.model)
    parts = chat_format(request, llm, asked)
    outputs = await generate_chat(llm, asked, parts, exchange_of(request))
    answer = CompletionAnswer("chatcmpl", asked)
    if asked.stream:
        return await streamed(
            request, outputs, lambda each: _events(each, answer, asked, parts, llm)
        )
    output = await whole(request, outputs)
    answer.count(0, output)

    def make() -> Response:
        choices = [
            _choice(part, parts.parser(output.prompt), asked, llm) for part in output.outputs
        ]
        body = answer.body(ChatCompletion, choices, answer.usage(), **_prompt(asked, output))
        if (found := output.prompt_logprobs) is not None:
            body = msgspec.structs.replace(body, prompt_logprobs=prompt_logprobs(found))
        return json_response(body)

    return await built(make, check_size(num_logprobs(output)))


@operation(
    "POST",
    "/v1/chat/completions/render",
    takes=ChatCompletionRequest,
    gives=GenerateRequest,
)
async def render_chat(request: Request, asked: ChatCompletionRequest) -> Response:
    """The prompt and the tokens of a chat, which is not answered."""
    check_chat(asked)
    llm = await served_models(request).get(asked.model)
    messages, params, options = await chat_call(llm, asked, chat_format(request, llm, asked))
    variables, is_cut = (
        options.pop("chat_template_kwargs"),
        asked.truncate_prompt_tokens is not None,
    )
    prompt = await llm.chat_prompt(messages, is_cut=is_cut, **options, **variables)
    return json_response(await rendered(llm, asked, prompt, params))


def _choice(
    output: CompletionOutput, parser: AnswerParser, asked: ChatCompletionRequest, llm: AsyncLLM
) -> ChatChoice:
    found = parser.feed(output.text, at_end=True)
    calls = [part for part in found if isinstance(part, ToolCall)]
    reasoning = "".join(part.text for part in found if isinstance(part, Reasoning))
    content = _echoed(asked) + "".join(part for part in found if isinstance(part, str))
    return ChatChoice(
        index=output.index,
        message=AnswerMessage(
            content=None if not content and (calls or reasoning) else content,
            reasoning=UNSET if asked.include_reasoning is False else reasoning or UNSET,
            tool_calls=[_whole_call(call) for call in calls] or UNSET,
        ),
        logprobs=_logprobs(output, asked, llm),
        finish_reason=_finish_reason(output, parser),
        stop_reason=output.stop_reason,
        token_ids=output.token_ids if asked.return_token_ids else UNSET,
    )


def _echoed(asked: ChatCompletionRequest) -> str:
    last = asked.messages[-1]
    if not asked.echo or last.role != "assistant":
        return ""
    if isinstance(last.content, list):
        return "".join(str(part.get("text", "")) for part in last.content)
    return last.content or ""


def _prompt(asked: ChatCompletionRequest, output: RequestOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if asked.return_token_ids:
        fields["prompt_token_ids"] = output.prompt_token_ids
    if asked.return_prompt_text:
        fields["prompt_text"] = output.prompt
    return fields


def _whole_call(call: ToolCall) -> AnswerToolCall:
    function = CallFunction(name=call.name, arguments=call.arguments)
    return AnswerToolCall(id=call.id, type="function", function=function)


def _finish_reason(output: CompletionOutput, parser: AnswerParser | None) -> str | None:
    reason = finish_reason(output)
    return "tool_calls" if reason == "stop" and parser and parser.num_calls else reason


def _deltas(
    output: CompletionOutput, parser: AnswerParser | None, asked: ChatCompletionRequest
) -> list[Delta]:
    """The deltas of an output, at least one."""
    if parser is None:
        return [Delta(content=output.text) if output.text else Delta()]
    number = parser.num_calls
    deltas = []
    for part in parser.feed(output.text, at_end=output.finished()):
        match part:
            case str():
                deltas.append(Delta(content=part))
            case Reasoning(text) if asked.include_reasoning is not False:
                deltas.append(Delta(reasoning=text))
            case ToolCall():
                head = CallFunction(name=part.name, arguments="")
                call = AnswerToolCall(index=number, id=part.id, type="function", function=head)
                deltas.append(Delta(tool_calls=[call]))
                number += 1
                if part.arguments:
                    deltas.append(_arguments_delta(number - 1, part.arguments))
            case ArgumentsDelta(text):
                deltas.append(_arguments_delta(number - 1, text))
    return deltas or [Delta()]


def _arguments_delta(index: int, text: str) -> Delta:
    return Delta(tool_calls=[AnswerToolCall(index=index, function=CallFunction(arguments=text))])


def _logprobs(
    output: CompletionOutput, asked: ChatCompletionRequest, llm: AsyncLLM
) -> ChatLogprobs | None:
    if not asked.logprobs or output.logprobs is None:
        return None
    return ChatLogprobs(
        token_logprobs(
            output.token_ids,
            output.logprobs,
            asked.top_logprobs or 0,
            llm.get_tokenizer(),
            skip_special_tokens=asked.skip_special_tokens is not False,
            as_ids=bool(asked.return_tokens_as_token_ids),
        )
    )


def _says_more(choice: ChatChunkChoice) -> bool:
    """Whether the choice carries more than its delta."""
    return (
        choice.finish_reason is not None
        or choice.logprobs is not None
        or choice.token_ids is not UNSET
    )


async def _events(
    outputs: AsyncGenerator[RequestOutput, None],
    answer: CompletionAnswer,
    asked: ChatCompletionRequest,
    parts: AnswerFormat,
    llm: AsyncLLM,
) -> AsyncGenerator[bytes, None]:
    are_texts_only = parts.is_plain and not (
        asked.logprobs
        or asked.return_token_ids
        or asked.return_prompt_text
        or answer.counts_in_events
    )
    texts: dict[int, TextEvents] = {}
    parsers: dict[int, AnswerParser] = {}
    for index in range(asked.n or 1):
        first = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        yield answer.event(ChatCompletionChunk, [first], counts=False)
        if echoed := _echoed(asked):
            again = ChatChunkChoice(index=index, delta=Delta(content=echoed))
            yield answer.event(ChatCompletionChunk, [again], counts=False)
        empty = ChatChunkChoice(index=index, delta=Delta(content=""))
        example = answer.event(ChatCompletionChunk, [empty], counts=False)
        texts[index] = TextEvents(example, "content")
    prompt: dict[str, Any] | None = None
    async for output in outputs:
        answer.count(0, output)
        prompt = _prompt(asked, output) if prompt is None else prompt
        for part in output.outputs:
            if are_texts_only and part.text and part.finish_reason is None:
                yield texts[part.index].event(part.text)
                continue
            parser = None
            if not parts.is_plain:
                if part.index not in parsers:
                    parser = parts.parser(output.prompt, streams_arguments=True)
                    parsers[part.index] = parser
                parser = parsers[part.index]
            *deltas, last = _deltas(part, parser, asked)
            for delta in deltas:
                more = ChatChunkChoice(index=part.index, delta=delta)
                yield answer.event(ChatCompletionChunk, [more], counts=False)
            logprobs = await built(partial(_logprobs, part, asked, llm), num_logprobs(output))
            choice = ChatChunkChoice(
                index=part.index,
                delta=last,
                logprobs=logprobs,
                finish_reason=_finish_reason(part, parser),
                stop_reason=UNSET if part.stop_reason is None else part.stop_reason,
                token_ids=part.token_ids if asked.return_token_ids else UNSET,
            )
            if parser is None or last != _NOTHING or _says_more(choice):
                yield answer.event(ChatCompletionChunk, [choice], **prompt)
                prompt = {}
    yield answer.end(ChatCompletionChunk)
