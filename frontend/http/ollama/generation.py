"""POST /api/chat and /api/generate."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.caller import Caller
from frontend.http.error_forms import OllamaErrorResponse
from frontend.http.event_stream import (
    EventStream,
    begun,
    decode,
    ending_with_errors,
    json_response,
    until_disconnect,
)
from frontend.http.exchange import Exchange
from frontend.http.ollama.models import served_model
from frontend.http.ollama.requests import ChatRequest, GenerateRequest, Options
from frontend.http.ollama.responses import Answer, ChatAnswer, ChatAnswerMessage, GenerateAnswer
from frontend.http.openai.generation import EngineFailure, finish_reason, token_logprobs
from frontend.input_processor import TokensPrompt
from frontend.outputs import RequestOutput
from frontend.sampling_params import FIRST_ANSWER_SAMPLING, RequestOutputKind, SamplingParams

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_generate_decoder = msgspec.json.Decoder(GenerateRequest)
_SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "seed", "stop")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_DURATION = re.compile(r"-?(\d+(\.\d+)?|(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+)")


class LineStream(EventStream):
    """One JSON document a line."""

    media_type = "application/x-ndjson"


def line(body: msgspec.Struct) -> bytes:
    return msgspec.json.encode(body) + b"\n"


async def chat(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of lines."""
    return await _answer(request, decode(_chat_decoder, await request.body()))


async def generate(request: Request) -> Response:
    """Answer or continue one prompt, whole or as a stream of lines."""
    return await _answer(request, decode(_generate_decoder, await request.body()))


async def _answer(request: Request, asked: ChatRequest | GenerateRequest) -> Response:
    started_s = time.monotonic()
    _check(asked)
    _, llm = await served_model(request, asked.model)
    run = _Run(asked, llm, request.scope["exchange"], started_s, loaded_s=time.monotonic())
    if not (asked.messages if isinstance(asked, ChatRequest) else asked.prompt):
        answer = run.part("", done=True, done_reason="load")
        return LineStream(_one(line(answer))) if asked.stream else json_response(answer)
    prompt = await asyncio.to_thread(_prompt, llm, asked)
    params = _sampling_params(llm, asked, len(prompt["prompt_token_ids"]))
    caller = Caller.of(request)
    outputs = llm.generate(
        prompt,
        params,
        caller.engine_request_id(),
        priority=caller.priority(None),
        tenant=caller.tenant(None),
    )
    if asked.stream is not False:
        started = await until_disconnect(request, begun(outputs))
        if started is None:
            return Response(status_code=499)
        return LineStream(ending_with_errors(_lines(started, run), _error_line))
    output = await until_disconnect(request, _last(outputs))
    if output is None:
        return Response(status_code=499)
    return json_response(run.last(output, output.outputs[0].text))


def _check(asked: ChatRequest | GenerateRequest) -> None:
    if asked.format:
        raise not_supported("format", asked.format, "omit it, and check the answer")
    if asked.think:
        raise not_supported("think", asked.think, "use false")
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true")
    if isinstance(asked, GenerateRequest):
        if asked.raw and (asked.system or asked.context):
            raise ApiError(400, "raw goes without system and context; put them into the prompt")
    elif asked.tools:
        raise ApiError(400, "tools are not supported; omit them")
    if asked.keep_alive is None:
        return
    keep_alive = str(asked.keep_alive)
    if not _DURATION.fullmatch(keep_alive):
        raise ApiError(400, f'keep_alive is {keep_alive!r}, it must be like 300, "5m" or -1')
    if not re.search("[1-9]", keep_alive):
        raise not_supported("keep_alive", keep_alive, "stop the engine to free its memory")


def _prompt(llm: AsyncLLM, asked: ChatRequest | GenerateRequest) -> TokensPrompt:
    """Runs in a thread: a template may take as long as its limit."""
    tokenizer = llm.get_tokenizer()
    template = tokenizer.chat_template
    variables = {}
    if asked.think is False and "enable_thinking" in (template or ""):
        variables["enable_thinking"] = False
    if isinstance(asked, ChatRequest):
        messages = [_template_message(msgspec.structs.asdict(each)) for each in asked.messages]
        return llm.input_processor.chat_prompt(messages, **variables)
    assert asked.prompt is not None
    context = asked.context or []
    if asked.raw or (template is None and not asked.system):
        token_ids = tokenizer.encode(asked.prompt, add_special_tokens=not context)
        return {"prompt_token_ids": context + token_ids}
    messages = [{"role": "user", "content": asked.prompt}]
    if asked.system:
        messages.insert(0, {"role": "system", "content": asked.system})
    prompt = llm.input_processor.chat_prompt(messages, **variables)
    return {"prompt_token_ids": context + prompt["prompt_token_ids"]}


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    """With the names that templates know."""
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    return {names.get(name, name): value for name, value in message.items() if value}


def _sampling_params(
    llm: AsyncLLM, asked: ChatRequest | GenerateRequest, num_prompt_tokens: int
) -> SamplingParams:
    options = asked.options or Options()
    given = {name: getattr(options, name) for name in (*_SAME_NAMES, *_PENALTIES)}
    given["repetition_penalty"] = options.repeat_penalty
    max_tokens = options.num_predict if (options.num_predict or 0) > 0 else None
    if options.num_ctx is not None:
        limit = llm.model.max_model_len
        if options.num_ctx > limit:
            raise ApiError(
                400,
                f"options.num_ctx is {options.num_ctx}, this engine's limit is {limit}; lower it, "
                "or start the engine with a larger --max-model-len",
            )
        room = options.num_ctx - num_prompt_tokens
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {num_prompt_tokens} tokens and options.num_ctx is "
                f"{options.num_ctx}; shorten it, or raise num_ctx",
            )
        max_tokens = min(max_tokens or room, room)
    defaults = SamplingParams.from_defaults(llm.model.default_sampling or FIRST_ANSWER_SAMPLING)
    return dataclasses.replace(
        defaults,
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        output_kind=(
            RequestOutputKind.FINAL_ONLY if asked.stream is False else RequestOutputKind.DELTA
        ),
    )


@dataclass
class _Run:
    """One answer. Times are of the monotonic clock."""

    asked: ChatRequest | GenerateRequest
    llm: AsyncLLM
    exchange: Exchange
    started_s: float
    loaded_s: float
    token_ids: list[int] = dataclasses.field(default_factory=list)

    def part(self, text: str, **fields: Any) -> Answer:
        if isinstance(self.asked, ChatRequest):
            message = ChatAnswerMessage(content=text)
            return ChatAnswer(model=self.asked.model, message=message, **fields)
        return GenerateAnswer(model=self.asked.model, response=text, **fields)

    def logprobs(self, output: RequestOutput) -> Any:
        part = output.outputs[0]
        if not self.asked.logprobs or not part.logprobs:
            return UNSET
        num_top, tokenizer = self.asked.top_logprobs or 0, self.llm.get_tokenizer()
        return token_logprobs(part.token_ids, part.logprobs, num_top, tokenizer)

    def delta(self, output: RequestOutput) -> Answer:
        self.token_ids += output.outputs[0].token_ids
        return self.part(output.outputs[0].text, logprobs=self.logprobs(output))

    def last(self, output: RequestOutput, text: str = "") -> Answer:
        """
        Raises:
            EngineFailure: it ended neither by the model nor by a limit of its own.
        """
        part = output.outputs[0]
        reason = finish_reason(part)
        if reason not in ("stop", "length"):
            raise EngineFailure(part.detail or f"the engine ended the request: {reason}")
        token_ids = self.token_ids or part.token_ids
        self.exchange.num_prompt_tokens = len(output.prompt_token_ids)
        self.exchange.num_output_tokens = len(token_ids)
        fields: dict[str, Any] = {}
        if isinstance(self.asked, GenerateRequest) and not self.asked.raw:
            fields["context"] = output.prompt_token_ids + token_ids
        if not self.token_ids:
            fields["logprobs"] = self.logprobs(output)
        times = output.metrics.engine
        if times is not None and times.first_token_s is not None:
            scheduled_s = times.first_scheduled_s or 0.0
            fields["prompt_eval_duration"] = _ns(times.first_token_s - scheduled_s)
            fields["eval_duration"] = _ns(times.finished_s - times.first_token_s)
        return self.part(
            text,
            done=True,
            done_reason=reason,
            total_duration=_ns(time.monotonic() - self.started_s),
            load_duration=_ns(self.loaded_s - self.started_s),
            prompt_eval_count=len(output.prompt_token_ids),
            eval_count=len(token_ids),
            **fields,
        )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def _one(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


def _error_line(error: ApiError) -> bytes:
    return line(OllamaErrorResponse(error.message))


async def _lines(
    outputs: AsyncGenerator[RequestOutput, None], run: _Run
) -> AsyncGenerator[bytes, None]:
    async for output in outputs:
        delta = run.delta(output)
        if output.outputs[0].text or delta.logprobs is not UNSET:
            yield line(delta)
        if output.finished:
            yield line(run.last(output))
