"""POST /api/chat and /api/generate."""

import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.answer_parts import (
    AnswerFormat,
    AnswerParser,
    Reasoning,
    answer_format,
    thinking_variables,
)
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.event_stream import (
    LineStream,
    built,
    json_response,
    line,
    streamed,
    whole,
)
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.generation.answers import (
    EngineFailure,
    check_size,
    finish_reason,
    num_logprobs,
    token_logprobs,
)
from frontend.http.generation.chat import offered_tools
from frontend.http.generation.conversation import check_role, template_tools
from frontend.http.generation.parameters import sampling_params
from frontend.http.generation.requests import GenerationRequest
from frontend.http.ollama import bodies
from frontend.http.ollama.context import Context
from frontend.http.ollama.models import find_model, served_model
from frontend.http.on_demand.options import keep_alive_seconds
from frontend.http.operations import operation
from frontend.http.tools.calls import ToolCall
from frontend.inputs.prompts import TokensPrompt
from frontend.outputs import RequestOutput
from frontend.presets.llm import PresetLLM
from frontend.sampling_params import FIRST_ANSWER_SAMPLING, SamplingParams
from frontend.structured_outputs import StructuredOutputsParams
from frontend.text.long_texts import read_texts

_SAME_NAMES = set(bodies.Options.__struct_fields__) & set(GenerationRequest.__struct_fields__)
_ROLES = ("system", "user", "assistant", "tool")
_PLAIN = AnswerFormat()


@operation(
    "POST", "/api/chat", takes=bodies.ChatRequest, gives=bodies.ChatAnswer, line=bodies.ChatAnswer
)
async def chat(request: Request, asked: bodies.ChatRequest) -> Response:
    """Answer a conversation, whole or as a stream of lines."""
    return await _answer(request, asked)


@operation(
    "POST",
    "/api/generate",
    takes=bodies.GenerateRequest,
    gives=bodies.GenerateAnswer,
    line=bodies.GenerateAnswer,
)
async def generate(request: Request, asked: bodies.GenerateRequest) -> Response:
    """Answer or continue one prompt, whole or as a stream of lines."""
    return await _answer(request, asked)


async def _answer(request: Request, asked: bodies.ChatRequest | bodies.GenerateRequest) -> Response:
    started_s = time.monotonic()
    _check(asked)
    is_empty = not (asked.messages if isinstance(asked, bodies.ChatRequest) else asked.prompt)
    keep_alive_s = None if asked.keep_alive is None else keep_alive_seconds(asked.keep_alive)
    by_admin = exchange_of(request).is_admin
    if is_empty and keep_alive_s == 0:
        (await find_model(request, asked.model)).keep_alive(0, by_admin=by_admin)
        return _without_text(asked, "unload")
    model, llm = await served_model(request, asked.model)
    if isinstance(llm, PresetLLM):
        asked.options = asked.options or bodies.Options()
        for name, value in llm.preset.parameters.given().items():
            if getattr(asked.options, name) is None:
                setattr(asked.options, name, value)
    if keep_alive_s is not None:
        model.keep_alive(keep_alive_s, by_admin=by_admin)
    if is_empty:
        return _without_text(asked, "load")
    run = _Run(asked, llm, exchange_of(request), started_s, loaded_s=time.monotonic())
    constrained = _constrained(asked)
    if isinstance(asked, bodies.GenerateRequest) and asked.raw:
        run.parts = AnswerFormat(structured_outputs=constrained)
    else:
        tools = offered_tools(asked.tools) if isinstance(asked, bodies.ChatRequest) else []
        run.parts = answer_format(request, llm, None, tools=tools, constrained=constrained)
    if asked.think and run.parts.reasoning is None:
        raise ApiError(400, f"{asked.model!r} does not support thinking; use think=false")
    prompt = await _prompt(llm, asked)
    params = _sampling_params(run, len(prompt["prompt_token_ids"]))
    outputs = llm.generate(prompt, params, **run.exchange.generates_as())
    if asked.stream is not False:
        return await streamed(request, outputs, lambda each: _lines(each, run), form=LineStream)
    output = await whole(request, outputs)
    make = functools.partial(run.fields, output)
    return json_response(run.last(output, await built(make, check_size(num_logprobs(output)))))


def _check(asked: bodies.ChatRequest | bodies.GenerateRequest) -> None:
    if isinstance(asked.format, str) and asked.format not in ("", "json"):
        raise not_supported("format", asked.format, 'use "json" or a JSON schema')
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true")
    if isinstance(asked, bodies.GenerateRequest) and asked.raw and (asked.system or asked.context):
        raise ApiError(400, "raw goes without system and context; put them into the prompt")


def _constrained(asked: bodies.GenerationRequest) -> StructuredOutputsParams | None:
    if not asked.format:
        return None
    is_schema = isinstance(asked.format, dict)
    return StructuredOutputsParams(
        json=asked.format if is_schema else None,
        json_object=None if is_schema else True,
        field="format",
    )


def _without_text(asked: bodies.ChatRequest | bodies.GenerateRequest, reason: str) -> Response:
    answer = _answer_to(asked, done=True, done_reason=reason)
    return json_response(answer) if asked.stream is False else LineStream(_one(line(answer)))


async def _prompt(
    llm: AsyncLLM, asked: bodies.ChatRequest | bodies.GenerateRequest
) -> TokensPrompt:
    tokenizer = llm.get_tokenizer()
    template = tokenizer.chat_template
    tools = template_tools(asked.tools) if isinstance(asked, bodies.ChatRequest) else None
    variables: dict[str, Any] = {}
    if asked.think is not None:
        variables = thinking_variables(llm, thinks=bool(asked.think), has_tools=bool(tools))
    if isinstance(asked.think, str):
        variables["reasoning_effort"] = asked.think
    fitting = Context(llm, asked.options or bodies.Options(), truncates=asked.truncate is not False)
    if isinstance(asked, bodies.ChatRequest):
        for index, each in enumerate(asked.messages or ()):
            check_role(each.role, f"messages[{index}].role", template or "", _ROLES)
        messages = [_template_message(each) for each in asked.messages or ()]
        make = functools.partial(llm.chat_prompt, is_cut=True, tools=tools, **variables)
        return await fitting.chat_prompt(make, messages)
    assert asked.prompt is not None
    context = asked.context or []
    if asked.images and (context or asked.raw):
        raise ApiError(400, "images go without raw and context; use /api/chat")
    if isinstance(llm, PresetLLM) and asked.system is None and not context:
        asked.system = llm.preset.system
    if asked.raw or (template is None and not asked.system):
        encode = functools.partial(
            llm.input_processor.encode,
            asked.prompt,
            add_special_tokens=not context,
            is_cut=True,
        )
        token_ids = await read_texts(encode, len(asked.prompt))
        return fitting.cut({"prompt_token_ids": context + token_ids})
    messages = [{"role": "user", "content": _content(asked.prompt, asked.images)}]
    if asked.system:
        messages.insert(0, {"role": "system", "content": asked.system})
    if context:  # it begins with the messages of a preset
        prompt = await AsyncLLM.chat_prompt(llm, messages, is_cut=True, **variables)
    else:
        prompt = await llm.chat_prompt(messages, is_cut=True, **variables)
    return fitting.cut({**prompt, "prompt_token_ids": context + prompt["prompt_token_ids"]})


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Images stand before the text."""
    if not images:
        return text
    urls = [{"url": f"data:image;base64,{image}"} for image in images]
    parts = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def _template_message(message: bodies.ConversationMessage) -> dict[str, Any]:
    """The message with the names that templates know."""
    calls = [
        {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
        for call in message.tool_calls or ()
    ]
    optional = {
        "reasoning_content": message.thinking,
        "tool_calls": calls,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
    given = {name: value for name, value in optional.items() if value}
    return {
        "role": message.role,
        "content": _content(message.content or "", message.images),
        **given,
    }


def _sampling_params(run: "_Run", num_prompt_tokens: int) -> SamplingParams:
    llm, asked = run.llm, run.asked
    options = asked.options or bodies.Options()
    max_tokens = int(options.num_predict or 0) if (options.num_predict or 0) > 0 else None
    if options.num_ctx is not None:
        room = int(options.num_ctx) - num_prompt_tokens
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {num_prompt_tokens} tokens and options.num_ctx is "
                f"{options.num_ctx}; shorten it, or raise num_ctx",
            )
        max_tokens = min(max_tokens or room, room)
    like_ours = GenerationRequest(
        stream=asked.stream is not False,
        repetition_penalty=options.repeat_penalty,
        skip_special_tokens=not run.parts.shows_special_tokens,
        vllm_xargs=asked.vllm_xargs,
    )
    recommended = {} if llm.model.default_sampling else FIRST_ANSWER_SAMPLING
    for name in _SAME_NAMES:
        value = getattr(options, name)
        setattr(like_ours, name, recommended.get(name) if value is None else value)
    return sampling_params(
        llm,
        like_ours,
        max_tokens=max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        constrained=run.parts.structured_outputs,
    )


@dataclass
class _Run:
    """One answer. Times are of the monotonic clock."""

    asked: bodies.ChatRequest | bodies.GenerateRequest
    llm: AsyncLLM
    exchange: Exchange
    started_s: float
    loaded_s: float
    parts: AnswerFormat = _PLAIN
    parser: AnswerParser | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)

    def answer(self, **fields: Any) -> bodies.OllamaAnswer:
        return _answer_to(self.asked, **fields)

    def fields(self, output: RequestOutput) -> dict[str, Any]:
        """The fields that an output adds to the answer."""
        new = output.outputs[0]
        self.token_ids += new.token_ids
        if self.parser is None:
            self.parser = self.parts.parser(output.prompt)
        number = self.parser.num_calls
        found = self.parser.feed(new.text, at_end=output.finished)
        fields: dict[str, Any] = {
            "content": "".join(part for part in found if isinstance(part, str)),
            "thinking": "".join(part.text for part in found if isinstance(part, Reasoning)),
            "calls": [
                _call(index, part)
                for index, part in enumerate((p for p in found if isinstance(p, ToolCall)), number)
            ],
        }
        if self.asked.logprobs and new.logprobs:
            num_top, tokenizer = self.asked.top_logprobs or 0, self.llm.get_tokenizer()
            fields["logprobs"] = token_logprobs(new.token_ids, new.logprobs, num_top, tokenizer)
        return {name: value for name, value in fields.items() if value}

    def last(self, output: RequestOutput, fields: dict[str, Any]) -> bodies.OllamaAnswer:
        """
        Raises:
            EngineFailure: it ended neither by the model nor by a limit of its own.
        """
        part = output.outputs[0]
        reason = finish_reason(part)
        if reason not in ("stop", "length"):
            raise EngineFailure(part.detail or f"the engine ended the request: {reason}")
        self.exchange.num_prompt_tokens = len(output.prompt_token_ids)
        self.exchange.num_output_tokens = len(self.token_ids)
        if isinstance(self.asked, bodies.GenerateRequest) and not self.asked.raw:
            fields["context"] = output.prompt_token_ids + self.token_ids
        times = output.metrics.engine
        if times is not None and times.first_token_s is not None:
            scheduled_s = times.first_scheduled_s or 0.0
            fields["prompt_eval_duration"] = _ns(times.first_token_s - scheduled_s)
            fields["eval_duration"] = _ns(times.finished_s - times.first_token_s)
        return self.answer(
            done=True,
            done_reason=reason,
            total_duration=_ns(time.monotonic() - self.started_s),
            load_duration=_ns(self.loaded_s - self.started_s),
            prompt_eval_count=len(output.prompt_token_ids),
            eval_count=len(self.token_ids),
            **fields,
        )


def _answer_to(
    asked: bodies.ChatRequest | bodies.GenerateRequest,
    content: str = "",
    thinking: str = "",
    calls: Sequence[bodies.OllamaCall] = (),
    **rest: Any,
) -> bodies.OllamaAnswer:
    if isinstance(asked, bodies.ChatRequest):
        message = bodies.ChatAnswerMessage(
            content=content, thinking=thinking or UNSET, tool_calls=list(calls) or UNSET
        )
        return bodies.ChatAnswer(model=asked.model, message=message, **rest)
    return bodies.GenerateAnswer(
        model=asked.model, response=content, thinking=thinking or UNSET, **rest
    )


def _call(index: int, call: ToolCall) -> bodies.OllamaCall:
    arguments = msgspec.json.decode(call.arguments)
    function = bodies.OllamaFunction(index=index, name=call.name, arguments=arguments)
    return bodies.OllamaCall(id=call.id, function=function)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


async def _one(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


async def _lines(
    outputs: AsyncGenerator[RequestOutput, None], run: _Run
) -> AsyncGenerator[bytes, None]:
    async for output in outputs:
        if fields := await built(functools.partial(run.fields, output), num_logprobs(output)):
            yield line(run.answer(**fields))
        if output.finished:
            yield line(run.last(output, {}))
