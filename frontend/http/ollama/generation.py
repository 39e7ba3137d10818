"""POST /api/chat and /api/generate."""

import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.errors import PromptTooLong
from frontend.http.answer_parts import AnswerFormat, AnswerParser, Reasoning, answer_format
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
from frontend.http.generation.parameters import sampling_params
from frontend.http.generation.requests import GenerationRequest
from frontend.http.ollama import bodies
from frontend.http.ollama.context import TOO_LONG, Context, joined
from frontend.http.ollama.models import find_model, served_model
from frontend.http.ollama.prompts import prompt_of
from frontend.http.on_demand.options import keep_alive_seconds
from frontend.http.operations import operation
from frontend.http.tools.calls import ToolCall
from frontend.inputs.prompts import TokensPrompt
from frontend.outputs import RequestOutput
from frontend.presets.llm import PresetLLM
from frontend.sampling_params import FIRST_ANSWER_SAMPLING, SamplingParams
from frontend.structured_outputs import StructuredOutputsParams
from protocol.presets import Preset

logger = logging.getLogger(__name__)

_SAME_NAMES = set(bodies.Options.__struct_fields__) & set(GenerationRequest.__struct_fields__)
_PLAIN = AnswerFormat()
_MAX_TEMPLATE = 2**18
"""Characters of a request's template."""


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
    if keep_alive_s is not None:
        model.keep_alive(keep_alive_s, by_admin=by_admin)
    if is_empty:
        return _without_text(asked, "load")
    if "generate" not in llm.model.tasks:
        what = "chat" if isinstance(asked, bodies.ChatRequest) else "generate"
        tasks = ", ".join(llm.model.tasks)
        raise ApiError(400, f'"{asked.model}" does not support {what}; its tasks are {tasks}')
    options = asked.options or bodies.Options()
    if isinstance(llm, PresetLLM):
        for name, value in llm.preset.parameters.given().items():
            if getattr(options, name) is None:
                setattr(options, name, value)
    context = Context(llm, options, truncates=asked.truncate is not False)
    run = _Run(asked, llm, context, exchange_of(request), started_s, loaded_s=time.monotonic())
    run.parts = _format(request, asked, llm)
    try:
        prompt = await prompt_of(llm, asked, context)
    except PromptTooLong as error:
        raise ApiError(400, f"{TOO_LONG}: {error}", code="context_length_exceeded") from None
    params = _sampling_params(run, options, len(prompt["prompt_token_ids"]))
    outputs = _outputs(run, prompt, params)
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
    if isinstance(asked, bodies.GenerateRequest):
        if asked.raw and (asked.template or asked.system or asked.context):
            what = "raw mode does not support template, system, or context"
            raise ApiError(400, f"{what}; put them into the prompt")
        if (length := len(asked.template or "")) > _MAX_TEMPLATE:
            what = f"template has {length} characters, the limit is {_MAX_TEMPLATE}; shorten it"
            raise ApiError(400, what, param="template")
        for name in ("raw", "system", "context", "template", "images") if asked.suffix else ():
            if getattr(asked, name):
                raise ApiError(400, f"suffix goes without {name}; omit one of them")
        try:
            Preset(from_=asked.model, template=asked.template)
        except ValueError as error:
            raise ApiError(400, str(error), param="template") from None


def _format(
    request: Request, asked: bodies.ChatRequest | bodies.GenerateRequest, llm: AsyncLLM
) -> AnswerFormat:
    """How the answer is parsed. Raises ApiError: the model takes no tools, or cannot think."""
    constrained = None
    if asked.format:
        is_schema = isinstance(asked.format, dict)
        constrained = StructuredOutputsParams(
            json=asked.format if is_schema else None,
            json_object=None if is_schema else True,
            disable_additional_properties=is_schema,  # Ollama's grammars have none
            field="format",
        )
    if isinstance(asked, bodies.ChatRequest):
        tools = offered_tools(asked.tools)
        template = llm.get_tokenizer().used_template(None, has_tools=bool(tools)) or ""
        if tools and "tools" not in template:
            what = "its chat template has no place for tools; omit them"
            raise ApiError(400, f'"{asked.model}" does not support tools: {what}', param="tools")
        parts = answer_format(request, llm, None, tools=tools, constrained=constrained)
    elif asked.raw:
        reasoning = answer_format(request, llm, None).reasoning if asked.think else None
        parts = AnswerFormat(reasoning=reasoning, structured_outputs=constrained)
    elif asked.suffix:
        parts = AnswerFormat(structured_outputs=constrained)
    else:
        parts = answer_format(request, llm, asked.template or None, constrained=constrained)
    if asked.think and parts.reasoning is None:
        raise ApiError(400, f'"{asked.model}" does not support thinking; use think=false')
    if asked.think is None and parts.reasoning is not None:
        asked.think = True  # as in Ollama, whatever the template does by itself
    return parts


def _outputs(
    run: "_Run", prompt: TokensPrompt, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    """With `shift` those of an answer that goes on where the context is full: not of one that has
    a form or log-probabilities, or whose prompt has images."""
    options = run.exchange.generates_as()
    context, asked = run.context, run.asked
    if context.num_dropped_messages or context.num_dropped_tokens:
        logger.warning(
            "request %s: the prompt is longer than the context of %d tokens; %d messages and %d "
            "tokens are left out",
            *(run.exchange.request_id, context.num_tokens),
            *(context.num_dropped_messages, context.num_dropped_tokens),
        )
    is_fixed = params.structured_outputs is not None or asked.logprobs
    is_fixed = is_fixed or "multimodal" in prompt or "suffix" in prompt
    if not asked.shift or is_fixed:
        if params.max_tokens is None or run.room < params.max_tokens:
            params = dataclasses.replace(params, max_tokens=run.room)
        return run.llm.generate(prompt, params, **options)
    outputs = context.shifting(prompt, params, **options)
    return outputs if asked.stream is not False else joined(outputs)


def _without_text(asked: bodies.ChatRequest | bodies.GenerateRequest, reason: str) -> Response:
    answer = _answer_to(asked, done=True, done_reason=reason)
    return json_response(answer) if asked.stream is False else LineStream(_one(line(answer)))


def _sampling_params(
    run: "_Run", options: bodies.Options, num_prompt_tokens: int
) -> SamplingParams:
    llm, asked = run.llm, run.asked
    most = run.context.num_tokens
    run.room = most - num_prompt_tokens
    if run.room < 1:
        given = "" if options.num_ctx is None else f" (options.num_ctx is {options.num_ctx})"
        raise ApiError(
            400,
            f"{TOO_LONG}: the prompt has {num_prompt_tokens} tokens, the limit is {most - 1}"
            f"{given}; shorten it, or raise num_ctx",
            code="context_length_exceeded",
        )
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
        max_tokens=int(options.num_predict or 0) if (options.num_predict or 0) > 0 else None,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        constrained=run.parts.structured_outputs,
    )


@dataclass
class _Run:
    """One answer. Times are of the monotonic clock."""

    asked: bodies.ChatRequest | bodies.GenerateRequest
    llm: AsyncLLM
    context: Context
    exchange: Exchange
    started_s: float
    loaded_s: float
    parts: AnswerFormat = _PLAIN
    parser: AnswerParser | None = None
    room: int = 0
    """Tokens that the context has beside the prompt."""
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
            **self.context.dropped(),
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
