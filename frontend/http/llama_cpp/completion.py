"""POST /completion and /infill, as the server of llama.cpp has them."""

import contextlib
import functools
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.event_stream import event, json_response, merged, streamed, until_disconnect
from frontend.http.exchange import exchange_of
from frontend.http.generation.answers import (
    TokenCounts,
    check_size,
    finish_reason,
    finite,
    num_logprobs,
)
from frontend.http.llama_cpp.bodies import CompletionAnswer, CompletionRequest, InfillRequest
from frontend.http.llama_cpp.parameters import generation_settings, most_tokens, sampling_params
from frontend.http.llama_cpp.prompts import infill_prompt, read_prompts
from frontend.http.llama_cpp.slots import slots_of
from frontend.http.operations import Operation
from frontend.http.served_models import served_models
from frontend.inputs.fim import fim_format
from frontend.logprobs import Logprob
from frontend.outputs import CompletionOutput, RequestOutput
from frontend.sampling_params import SamplingParams
from frontend.text.long_texts import read_texts
from frontend.text.tokenizer import Tokenizer

_Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
_LINE = re.compile(r"\n([ \t]*)(?=[^ \t])")


async def completion(request: Request, asked: CompletionRequest) -> Response:
    """Continue one prompt or several, by llama.cpp's shapes."""
    llm = await served_models(request).get(asked.model)
    read = functools.partial(read_prompts, llm.input_processor, asked.prompt)
    prompts = await read_texts(read, len(str(asked.prompt)))
    return await _answered(request, asked, llm, prompts, sampling_params(llm, asked))


async def infill(request: Request, asked: InfillRequest) -> Response:
    """Fill in a gap between two texts, with other files beside them, by llama.cpp's shapes."""
    llm = await served_models(request).get(asked.model)
    processor = llm.input_processor
    known = fim_format(processor.tokenizer, processor.model.name)
    num_chars = sum(len(each.text) for each in asked.input_extra)
    num_chars += len(asked.input_prefix) + len(asked.input_suffix)
    prompt = await read_texts(functools.partial(infill_prompt, processor, asked), num_chars)
    params = sampling_params(llm, asked, stop_token_ids=known.stop_token_ids)
    return await _answered(request, asked, llm, [prompt], params)


async def _answered(
    request: Request,
    asked: CompletionRequest,
    llm: AsyncLLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
) -> Response:
    exchange = exchange_of(request)
    asked.model = exchange.model
    has_slot = asked.id_slot is not None and asked.id_slot >= 0
    session = f"slot {asked.id_slot}" if has_slot else None
    slots, slot = await slots_of(request, asked.model), (exchange.owner, max(0, asked.id_slot or 0))
    salt = secrets.token_hex(8) if asked.cache_prompt is False else None
    streams = [
        _cut(
            llm.generate(
                {"prompt_token_ids": token_ids},
                params,
                cache_salt=salt,
                **exchange.generates_as(session=session),
            ),
            asked,
            params.n,
        )
        for token_ids in prompts
    ]
    answers = [_Answer(index, asked, llm, params) for index in range(len(prompts) * params.n)]
    counts = TokenCounts()

    async def bodies(outputs: _Outputs) -> AsyncGenerator[tuple[int, Any], None]:
        async for prompt, output in outputs:
            counts.count(prompt, output)
            for part in output.outputs:
                answer = answers[prompt * params.n + part.index]
                if slots is not None:
                    slots.keep(slot, llm, prompts[prompt], answer.token_ids)
                for body in answer.bodies(output, part):
                    yield answer.index, body

    async def events(outputs: _Outputs) -> AsyncGenerator[bytes, None]:
        async for _, body in bodies(outputs):
            yield event(body)

    async def whole() -> list[Any]:
        async with contextlib.aclosing(merged(streams)) as outputs:
            found = {index: body async for index, body in bodies(outputs)}
        return [found[index] for index in range(len(answers))]

    if asked.stream:
        return await streamed(request, merged(streams), events)
    found = await until_disconnect(request, whole())
    return json_response(found if len(found) > 1 else found[0])


async def _cut(
    outputs: AsyncGenerator[RequestOutput, None], asked: CompletionRequest, n: int
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs up to where the lines of each sample, or a prompt that is only cached, end them."""
    limits = [_LineLimits(asked) for _ in range(n)]
    is_cached_only = most_tokens(asked) == 0
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            output.outputs = [each for each in output.outputs if not limits[each.index].is_over]
            for part in output.outputs:
                if is_cached_only:
                    part.text, part.token_ids, part.logprobs = "", [], None
                    part.stop_reason = None
                    if part.finish_reason == "stop":
                        part.finish_reason = "length"
                else:
                    limits[part.index].cut(part)
            output.finished |= all(each.is_over for each in limits)
            yield output
            if output.finished:
                return


class _LineLimits:
    """Where one answer ends by its lines: at one that is indented less than `n_indent`, and with
    the first one that ends when `t_max_predict_ms` are over."""

    def __init__(self, asked: CompletionRequest) -> None:
        self._n_indent = asked.n_indent or 0
        self._max_s = (asked.t_max_predict_ms or 0) / 1000
        self._text = ""
        self._began_s: float | None = None
        self.is_over = False

    def cut(self, part: CompletionOutput) -> None:
        if not self._n_indent and self._max_s <= 0:
            return
        now_s = time.monotonic()
        began_s = self._began_s = now_s if self._began_s is None else self._began_s
        start = len(self._text)
        self._text += part.text
        ends = (line.end() for line in _LINE.finditer(self._text) if len(line[1]) < self._n_indent)
        if (end := next(ends, None)) is not None:
            part.text = self._text[start:end]
        elif part.finished() or "\n" not in part.text or not 0 < self._max_s < now_s - began_s:
            return
        self.is_over, part.finish_reason, part.stop_reason = True, "length", None


class _Answer:
    """One of the answers, as bodies: of a stream, or whole."""

    def __init__(
        self, index: int, asked: CompletionRequest, llm: AsyncLLM, params: SamplingParams
    ) -> None:
        self.index = index
        self._asked = asked
        self._llm = llm
        self._params = params
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self._probs: list[dict[str, Any]] = []

    def bodies(self, output: RequestOutput, part: CompletionOutput) -> list[Any]:
        """Raises EngineFailure: it failed."""
        reason, asked = finish_reason(part), self._asked
        probs = []
        if part.logprobs is not None:
            check_size(0 if asked.stream else num_logprobs(output))
            probs = _probabilities(part.token_ids, part.logprobs, self._llm.get_tokenizer())
        self._texts.append(part.text)
        self.token_ids += part.token_ids
        self._probs += probs
        found = []
        if asked.stream and (part.text or part.token_ids):
            body = self._body(output, part.text, part.token_ids, stop=False)
            timings = _timings(output, len(self.token_ids)) if asked.timings_per_token else UNSET
            body = msgspec.structs.replace(
                body, timings=timings, completion_probabilities=probs or UNSET
            )
            found.append(body)
        if reason is not None:
            found.append(self._last(output, part))
        return found

    def _body(
        self, output: RequestOutput, text: str, token_ids: list[int], *, stop: bool
    ) -> CompletionAnswer:
        return CompletionAnswer(
            index=self.index,
            content=text,
            tokens=token_ids,
            id_slot=-1 if self._asked.id_slot is None else self._asked.id_slot,
            stop=stop,
            tokens_predicted=len(self.token_ids),
            tokens_evaluated=len(output.prompt_token_ids),
        )

    def _last(self, output: RequestOutput, part: CompletionOutput) -> Any:
        asked, llm, prompt = self._asked, self._llm, output.prompt_token_ids
        is_whole, stopped = not asked.stream, part.finish_reason == "stop"
        word = part.stop_reason if isinstance(part.stop_reason, str) and stopped else ""
        text = "".join(self._texts)
        num_tokens = len(prompt) + len(self.token_ids)
        body = msgspec.structs.replace(
            self._body(
                output,
                text if is_whole else "",
                self.token_ids if is_whole and asked.return_tokens else [],
                stop=True,
            ),
            model=asked.model or "",
            generation_settings=generation_settings(asked, self._params),
            prompt=llm.get_tokenizer().decode(prompt, skip_special_tokens=False),
            has_new_line="\n" in text,
            truncated=not stopped and num_tokens >= llm.model.max_model_len,
            stop_type="word" if word else "eos" if stopped else "limit",
            stopping_word=word,
            tokens_cached=num_tokens - (1 if self.token_ids else 0),
            timings=_timings(output, len(self.token_ids)),
            completion_probabilities=self._probs if is_whole and self._probs else UNSET,
        )
        return body if asked.response_fields is None else _chosen(body, asked.response_fields)


def _chosen(body: CompletionAnswer, names: Sequence[str]) -> dict[str, Any]:
    """The fields of these names, "object/field" too; what is not there is left out."""
    document = msgspec.to_builtins(body)
    found: dict[str, Any] = {}
    for name in names:
        value: Any = document
        *outer, last = name.split("/")
        for part in outer:
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, dict) and last in value:
            found[name] = value[last]
    return found


def _timings(output: RequestOutput, num_tokens: int) -> dict[str, float]:
    """In milliseconds: of the engine where it has said them, else as this client saw them."""
    metrics, engine = output.metrics, output.metrics.engine
    first_s = metrics.first_token_s or 0.0
    prompt_s, answer_s = first_s, (metrics.last_token_s or first_s) - first_s
    if engine is not None and engine.first_token_s is not None:
        prompt_s = engine.first_token_s - (engine.first_scheduled_s or 0.0)
        answer_s = engine.finished_s - engine.first_token_s
    num_cached = output.num_cached_tokens or 0
    found: dict[str, float] = {"cache_n": num_cached}
    for name, number, seconds in (
        ("prompt", len(output.prompt_token_ids) - num_cached, prompt_s),
        ("predicted", num_tokens, answer_s),
    ):
        found |= {
            f"{name}_n": number,
            f"{name}_ms": 1e3 * seconds,
            f"{name}_per_token_ms": 1e3 * seconds / max(1, number),
            f"{name}_per_second": number / seconds if seconds > 0 else 0.0,
        }
    if metrics.num_draft_tokens:
        drafts = {"draft_n": metrics.num_draft_tokens}
        found |= drafts | {"draft_n_accepted": metrics.num_accepted_tokens}
    return found


def _probabilities(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    pieces = tokenizer.pieces

    def of(token_id: int, found: Logprob) -> dict[str, Any]:
        return {
            "id": token_id,
            "token": pieces.text(token_id),
            "bytes": list(pieces.bytes_of(token_id)),
            "logprob": finite(found.logprob),
        }

    return [
        of(token_id, candidates[token_id])
        | {"top_logprobs": [of(*each) for each in candidates.items() if each[1].rank is not None]}
        for token_id, candidates in zip(token_ids, logprobs, strict=True)
    ]


OPERATIONS = [
    *(Operation("POST", path, completion, CompletionRequest, CompletionAnswer, CompletionAnswer)
      for path in ("/completion", "/completions")),
    Operation("POST", "/infill", infill, InfillRequest, CompletionAnswer, CompletionAnswer),
]  # fmt: skip
