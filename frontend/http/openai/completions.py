"""POST /v1/completions."""

from collections.abc import AsyncGenerator
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.event_stream import (
    TextEvents,
    all_outputs,
    json_response,
    merged,
    streamed,
    until_disconnect,
)
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.openai.generation import Answer, finish_reason, finite, token_text
from frontend.http.openai.parameters import sampling_params
from frontend.http.openai.requests import CompletionRequest
from frontend.http.openai.responses import Completion, CompletionChoice, CompletionLogprobs
from frontend.http.operations import operation
from frontend.http.served_models import ServedModels
from frontend.input_processor import PromptInput
from frontend.outputs import CompletionOutput, RequestOutput

_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 1024


@operation("POST", "/v1/completions", takes=CompletionRequest, gives=Completion, event=Completion)
async def completions(request: Request, asked: CompletionRequest) -> Response:
    """Continue one prompt or several, whole or as a stream of events."""
    models: ServedModels = request.app.state.models
    _check(asked)
    model, llm = await models.get(asked.model)
    prompts = _prompts(asked, llm)
    outputs = merged(_generate(llm, asked, prompts, exchange_of(request)))
    answer = Answer("cmpl", asked.model or model.names[0], asked)
    choices = _Choices(asked, llm)
    if asked.stream:
        return await streamed(request, outputs, lambda each: _events(each, answer, choices))
    found = await until_disconnect(request, all_outputs(outputs, len(prompts)))
    for index, output in enumerate(found):
        answer.count(index, output)
    parts = [
        choices.choice(index, output, part)
        for index, output in enumerate(found)
        for part in output.outputs
    ]
    return json_response(answer.body(Completion, parts, answer.usage()))


def _check(asked: CompletionRequest) -> None:
    if asked.echo and asked.logprobs is not None:
        raise not_supported("echo", True, "log-probabilities of a prompt are not computed")


def _prompts(asked: CompletionRequest, llm: AsyncLLM) -> list[PromptInput]:
    """Each prompt by itself."""
    given: list[Any] = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    if not 0 < len(given) <= _MAX_PROMPTS:
        raise ApiError(
            400, f"there are {len(given)} prompts, give 1 to {_MAX_PROMPTS}", param="prompt"
        )
    if asked.add_special_tokens is False:
        encode = llm.get_tokenizer().encode
        return [
            {"prompt": each, "prompt_token_ids": encode(each, add_special_tokens=False)}
            if isinstance(each, str)
            else each
            for each in given
        ]
    return given


def _generate(
    llm: AsyncLLM, asked: CompletionRequest, prompts: list[PromptInput], exchange: Exchange
) -> list[AsyncGenerator[RequestOutput, None]]:
    params = sampling_params(
        llm, asked, max_tokens=asked.max_tokens or _DEFAULT_MAX_TOKENS, logprobs=asked.logprobs
    )
    return [
        llm.generate(
            prompt,
            params,
            cache_salt=asked.cache_salt,
            **exchange.sent_as(asked.user or asked.safety_identifier, asked.priority),
        )
        for prompt in prompts
    ]


class _Choices:
    """Choices of an answer: prompt p's sample s has index `p * n + s`."""

    def __init__(self, asked: CompletionRequest, llm: AsyncLLM) -> None:
        self._asked = asked
        self._n = asked.n or 1
        self._llm = llm
        self.are_texts_only = not (
            asked.echo or asked.return_token_ids or asked.logprobs is not None
        )
        self._offsets: dict[int, int] = {}

    def index(self, prompt: int, part: CompletionOutput) -> int:
        return prompt * self._n + part.index

    def choice(
        self, prompt: int, output: RequestOutput, part: CompletionOutput
    ) -> CompletionChoice:
        index = self.index(prompt, part)
        text = part.text
        is_first = index not in self._offsets
        if self._asked.echo and is_first:
            text = self._prompt_text(output) + text
        logprobs = self._logprobs(index, part)
        self._offsets[index] = self._offsets.get(index, 0) + len(text)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason(part),
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if self._asked.return_token_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids
            if self._asked.return_token_ids and is_first
            else UNSET,
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._llm.get_tokenizer().decode(output.prompt_token_ids)

    def _logprobs(self, index: int, part: CompletionOutput) -> CompletionLogprobs | None:
        wanted = self._asked.logprobs
        if wanted is None or part.logprobs is None:
            return None
        tokenizer = self._llm.get_tokenizer()
        offset = self._offsets.get(index, 0)
        offsets, values, tokens, tops = [], [], [], []
        for token_id, candidates in zip(part.token_ids, part.logprobs, strict=True):
            text, _ = token_text(token_id, tokenizer)
            offsets.append(offset)
            offset += len(text)
            tokens.append(text)
            values.append(finite(candidates[token_id].logprob))
            tops.append(
                {
                    token_text(each, tokenizer)[0]: finite(found.logprob)
                    for each, found in candidates.items()
                    if each == token_id or (found.rank or 0) <= wanted
                }
            )
        return CompletionLogprobs(offsets, list(values), tokens, list(tops))


async def _events(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
    answer: Answer,
    choices: _Choices,
) -> AsyncGenerator[bytes, None]:
    are_texts_only = choices.are_texts_only and not answer.counts_in_events
    texts: dict[int, TextEvents] = {}
    async for prompt, output in outputs:
        answer.count(prompt, output)
        part = output.outputs[0]
        if are_texts_only and len(output.outputs) == 1 and part.finish_reason is None:
            index = choices.index(prompt, part)
            if index not in texts:
                empty = CompletionChoice(index=index, text="")
                texts[index] = TextEvents(answer.event(Completion, [empty]), "text")
            yield texts[index].event(part.text)
            continue
        parts = [choices.choice(prompt, output, part) for part in output.outputs]
        yield answer.event(Completion, parts)
    yield answer.end(Completion)
