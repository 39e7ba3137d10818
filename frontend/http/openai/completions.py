"""POST /v1/completions."""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.errors import InvalidInput
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import (
    TextEvents,
    all_outputs,
    built,
    in_pieces,
    json_response,
    merged,
    streamed,
    until_disconnect,
)
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.generation.answer_bodies import Completion, CompletionChoice, CompletionLogprobs
from frontend.http.generation.answers import (
    CompletionAnswer,
    check_size,
    finish_reason,
    finite,
    num_logprobs,
    prompt_logprobs,
    token_name,
)
from frontend.http.generation.parameters import sampling_params
from frontend.http.generation.requests import CompletionRequest
from frontend.http.generation.structured_outputs import structured_outputs
from frontend.http.openai.prompt_embeds import read_prompt_embeds
from frontend.http.openai.token_ids import GenerateRequest, rendered
from frontend.http.operations import operation
from frontend.http.served_models import served_models
from frontend.inputs.fim import fim_format
from frontend.inputs.prompts import InfillPrompt, PromptInput
from frontend.logprobs import Logprob, PromptLogprobs
from frontend.outputs import CompletionOutput, RequestOutput
from frontend.sampling_params import SamplingParams
from frontend.text.detokenizer import IncrementalDetokenizer

_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 1024


@operation("POST", "/v1/completions", takes=CompletionRequest, gives=Completion, event=Completion)
async def completions(request: Request, asked: CompletionRequest) -> Response:
    """Continue one prompt or several, whole or as a stream of events."""
    _check(asked)
    llm = await served_models(request).get(asked.model)
    prompts = await _prompts(asked, llm)
    outputs = merged(_generate(llm, asked, prompts, exchange_of(request)))
    if asked.max_tokens == 0:
        outputs = _prompts_alone(outputs)
    answer = CompletionAnswer("cmpl", asked)
    choices = _Choices(asked, llm)
    if asked.stream:
        return await streamed(request, outputs, lambda each: _events(each, answer, choices))
    found = await until_disconnect(request, all_outputs(outputs, len(prompts)))
    for index, output in enumerate(found):
        answer.count(index, output)

    def make() -> Response:
        parts = in_pieces(
            (
                choices.choice(index, output, part)
                for index, output in enumerate(found)
                for part in output.outputs
            ),
            size=16,
        )
        return json_response(answer.body(Completion, parts, answer.usage()))

    num_tokens = sum(len(each.prompt_token_ids) for each in found)
    return await built(make, num_tokens + check_size(sum(map(num_logprobs, found))))


def _check(asked: CompletionRequest) -> None:
    if asked.prompt_embeds and asked.echo:
        raise ApiError(400, "echo with prompt_embeds, which have no text; omit it", param="echo")
    if asked.suffix and (asked.echo or asked.prompt_embeds or asked.add_special_tokens is False):
        what = "suffix goes without echo, prompt_embeds and add_special_tokens=false"
        raise ApiError(400, f"{what}; omit them, or suffix", param="suffix")
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError(
            400, "max_tokens is 0, it must be at least 1, or 0 with echo=true", param="max_tokens"
        )


@operation("POST", "/v1/completions/render", takes=CompletionRequest, gives=list[GenerateRequest])
async def render_completions(request: Request, asked: CompletionRequest) -> Response:
    """The tokens of each prompt, which is not continued."""
    _check(asked)
    llm = await served_models(request).get(asked.model)
    params = _params(llm, asked)
    prompts = await _prompts(asked, llm)
    return json_response([await rendered(llm, asked, each, params) for each in prompts])


async def _prompts(asked: CompletionRequest, llm: AsyncLLM) -> list[PromptInput]:
    """Each prompt by itself, in tokens if it is one of several."""
    texts: list[Any] = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
    if asked.prompt is None:
        texts = []
    elif texts and isinstance(texts[0], int):
        texts = [texts]
    if asked.suffix:
        try:
            fim_format(llm.get_tokenizer(), llm.model.name)
        except InvalidInput as error:
            raise ApiError(400, str(error), param="suffix") from None
        texts = [_with_suffix(each, asked.suffix) for each in texts]
    files = asked.prompt_embeds or []
    given: list[Any] = [
        {"prompt_embeds": read_prompt_embeds(file, llm.model.prompt_embeds)}
        for file in (files if isinstance(files, list) else [files])[: _MAX_PROMPTS + 1]
    ]
    given += texts
    if not 0 < len(given) <= _MAX_PROMPTS:
        raise ApiError(
            400, f"there are {len(given)} prompts, give 1 to {_MAX_PROMPTS}", param="prompt"
        )
    add_special_tokens = asked.add_special_tokens is not False
    if add_special_tokens and (len(given) == 1 or llm.input_processor.encoder_prompts is not None):
        return given
    found: Any = await llm.tokenized(
        given,
        add_special_tokens=add_special_tokens,
        is_cut=asked.truncate_prompt_tokens is not None,
    )
    return list(found)


def _with_suffix(prompt: str | list[int], suffix: str) -> InfillPrompt:
    if not isinstance(prompt, str):
        raise ApiError(400, "a prompt beside a suffix is text; send no token ids", param="prompt")
    return {"prompt": prompt, "suffix": suffix}


def _params(llm: AsyncLLM, asked: CompletionRequest) -> SamplingParams:
    max_tokens = llm.preset_sampling.get("max_tokens", _DEFAULT_MAX_TOKENS)
    max_tokens = max_tokens if asked.max_tokens is None else max(1, asked.max_tokens)
    params = sampling_params(
        llm,
        asked,
        max_tokens=max_tokens,
        logprobs=asked.logprobs,
        constrained=structured_outputs(asked),
    )
    if asked.echo and params.prompt_logprobs is None:
        params = dataclasses.replace(params, prompt_logprobs=asked.logprobs)
    return params


def _generate(
    llm: AsyncLLM, asked: CompletionRequest, prompts: list[PromptInput], exchange: Exchange
) -> list[AsyncGenerator[RequestOutput, None]]:
    params = _params(llm, asked)
    return [
        llm.generate(
            prompt,
            params,
            cache_salt=asked.cache_salt,
            **exchange.generates_as(
                asked.user or asked.safety_identifier,
                asked.priority,
                asked.prompt_cache_key or asked.session_id,
            ),
        )
        for prompt in prompts
    ]


async def _prompts_alone(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs without the one token that each prompt was computed for."""
    async with contextlib.aclosing(outputs):
        async for prompt, output in outputs:
            for part in output.outputs:
                part.text, part.token_ids = "", []
                part.logprobs = None if part.logprobs is None else []
                if part.finish_reason == "stop":
                    part.finish_reason, part.stop_reason = "length", None
            yield prompt, output


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
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        """By prompt: in a stream one event has them, and each sample's first wants them."""
        self._num_logprobs = 0

    def index(self, prompt: int, part: CompletionOutput) -> int:
        return prompt * self._n + part.index

    def choice(
        self, prompt: int, output: RequestOutput, part: CompletionOutput
    ) -> CompletionChoice:
        index = self.index(prompt, part)
        text = part.text
        found = output.prompt_logprobs
        if found is not None and prompt not in self._prompt_logprobs:
            self._num_logprobs = check_size(self._num_logprobs + self._n * found.num_entries)
            self._prompt_logprobs[prompt] = found
        is_first = index not in self._offsets
        logprobs = self._logprobs(index, part)
        if self._asked.echo and is_first:
            prompt_text = self._prompt_text(output)
            text = prompt_text + text
            if logprobs is not None and prompt in self._prompt_logprobs:
                logprobs = self._with_prompt(prompt, output, len(prompt_text), logprobs)
        self._offsets[index] = self._offsets.get(index, 0) + len(text)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason(part),
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if self._asked.return_token_ids else UNSET,
            prompt_logprobs=(
                UNSET if self._asked.prompt_logprobs is None else prompt_logprobs(found)
            ),
            prompt_token_ids=output.prompt_token_ids
            if self._asked.return_token_ids and is_first
            else UNSET,
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._llm.get_tokenizer().decode(output.prompt_token_ids)

    def _logprobs(self, index: int, part: CompletionOutput) -> CompletionLogprobs | None:
        if self._asked.logprobs is None or part.logprobs is None:
            return None
        tokenizer = self._llm.get_tokenizer()
        offset = self._offsets.get(index, 0)
        offsets = []
        for token_id in part.token_ids:
            offsets.append(offset)
            offset += len(tokenizer.pieces.text(token_id))
        return self._columns(part.token_ids, part.logprobs, offsets)

    def _with_prompt(
        self, prompt: int, output: RequestOutput, num_chars: int, behind: CompletionLogprobs
    ) -> CompletionLogprobs:
        """`behind`: of the answer's text, which follows `num_chars` of the prompt's."""
        found = self._prompt_logprobs[prompt]
        offsets, offset = [], 0
        detokenizer = IncrementalDetokenizer(self._llm.get_tokenizer(), [])
        for token_id in output.prompt_token_ids:
            offsets.append(min(offset, num_chars))
            offset += len(detokenizer.append([token_id]))
        before = self._columns(output.prompt_token_ids, found, offsets)
        return CompletionLogprobs(
            before.text_offset + [num_chars + each for each in behind.text_offset],
            before.token_logprobs + behind.token_logprobs,
            before.tokens + behind.tokens,
            before.top_logprobs + behind.top_logprobs,
        )

    def _columns(
        self,
        token_ids: Sequence[int],
        found: Sequence[dict[int, Logprob] | None],
        offsets: list[int],
    ) -> CompletionLogprobs:
        wanted, tokenizer = self._asked.logprobs or 0, self._llm.get_tokenizer()
        named = functools.partial(
            token_name, tokenizer=tokenizer, as_id=bool(self._asked.return_tokens_as_token_ids)
        )
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, candidates in zip(token_ids, found, strict=True):
            if candidates is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(finite(candidates[token_id].logprob))
            tops.append(
                {
                    named(each): finite(one.logprob)
                    for each, one in candidates.items()
                    if each == token_id or (one.rank or 0) <= wanted
                }
            )
        texts = [named(token_id) for token_id in token_ids]
        return CompletionLogprobs(offsets, values, texts, tops)


async def _events(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
    answer: CompletionAnswer,
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

        def make(prompt: int = prompt, output: RequestOutput = output) -> bytes:
            parts = [choices.choice(prompt, output, part) for part in output.outputs]
            return answer.event(Completion, parts)

        yield await built(make, num_logprobs(output))
    yield answer.end(Completion)
