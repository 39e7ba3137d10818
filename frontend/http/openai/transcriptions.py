"""POST /v1/audio/transcriptions and /v1/audio/translations, by Whisper's models, and by decoders
that a prompt asks for a transcript."""

import asyncio
import contextlib
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import until_disconnect
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.generation.parameters import same_names
from frontend.http.openai.transcription_forms import (
    TranscribedSegment,
    TranscriptionRequest,
    VerboseTranscription,
    in_format,
)
from frontend.http.operations import operation
from frontend.http.served_models import served_models
from frontend.inputs.encoder_prompts import EncoderDecoderPrompt
from frontend.inputs.prompts import PromptInput
from frontend.multimodal.media import MediaItem, in_thread
from frontend.outputs import CompletionOutput
from frontend.sampling_params import SamplingParams
from frontend.text.long_texts import read_texts
from frontend.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from frontend.multimodal.audio import Floats
    from frontend.multimodal.audio_families import AudioFamily

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TIME = re.compile(r"<\|(\d+\.\d\d)\|>")
_QUIET_S, _CUT_S = 0.1, 1.0
"""A sound is cut where so long a part of the last second of a window is the quietest."""


@dataclass(frozen=True, slots=True)
class _Window:
    """A piece of sound that a model hears at once. Times in seconds."""

    start: float
    duration: float
    samples: "Floats"
    rate: int


@operation("POST", "/v1/audio/transcriptions", gives=VerboseTranscription)
async def transcriptions(request: Request) -> Response:
    """The text of a sound."""
    return await _answer(request, "transcribe")


@operation("POST", "/v1/audio/translations", gives=VerboseTranscription)
async def translations(request: Request) -> Response:
    """The English text of a sound in another language."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    asked, data = await _form(request)
    llm = await served_models(request).get(asked.model)
    encoder, exchange = llm.input_processor.encoder_prompts, exchange_of(request)
    hearing: _Hearing | _Asking
    if encoder is not None and encoder.modality == "audio":
        log_mel = encoder.log_mel()  # says what to install if numpy is missing
        hearing = _Hearing(llm, asked, task, exchange, encoder.start_token_ids)
        size = log_mel.num_samples
    elif (family := llm.input_processor.transcriber()) is not None:
        log_mel = family.log_mel
        hearing = _Asking(llm, asked, task, exchange, family)
        size = int(log_mel.sampling_rate * family.seconds_at_once(llm.model.max_model_len // 2))
    else:
        raise ApiError(
            400,
            f"model {exchange.model!r} does not transcribe; serve one of Whisper's, Voxtral or "
            "Qwen3-ASR",
            param="model",
        )
    cut = functools.partial(_windows, data, log_mel.sampling_rate, size)
    windows = await in_thread(cut, decodes=True)
    segments = await until_disconnect(request, hearing.all_of(windows))
    duration = sum(window.duration for window in windows)
    return in_format(asked, task, hearing.language or "", segments, duration)


async def _form(request: Request) -> tuple[TranscriptionRequest, bytes]:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "the body is no multipart/form-data; send a form with a file")
    fields: dict[str, Any] = {}
    data: bytes | None = None
    async with request.form(max_files=1, max_fields=64) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != "file":
                    raise ApiError(400, f"{name!r} is a file; send the sound as 'file'")
                data = await value.read()
            elif name.endswith("[]") or name == "timestamp_granularities":
                fields.setdefault(name.removesuffix("[]"), []).append(value)
            else:
                fields[name] = value
    if data is None:
        raise ApiError(400, "file is missing; give the sound's file", param="file")
    try:
        return msgspec.convert(fields, TranscriptionRequest, strict=False), data
    except msgspec.ValidationError as error:
        what = str(error).replace("Object contains unknown field", "not supported is the field")
        raise ApiError(400, f"{what}; /openapi.json lists what is") from None


# ---------------------------------------------------------------------- what the model hears


def _windows(data: bytes, rate: int, size: int) -> list[_Window]:
    """A file's sound in parts of at most `size` samples. Raises InvalidInput: no sound."""
    from frontend.multimodal.audio import load_audio, quietest

    samples = load_audio(data, "file", rate)
    windows, start = [], 0
    while start < len(samples):
        stop = start + size
        if stop < len(samples):
            late = stop - min(int(_CUT_S * rate), size // 2)
            stop = late + quietest(samples[late:stop], int(_QUIET_S * rate))
        part = samples[start:stop]
        windows.append(_Window(start / rate, len(part) / rate, part, rate))
        start = stop
    return windows


@functools.lru_cache(maxsize=4)
def _marks(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of languages, tasks and times, by name."""
    names = (
        (tokenizer.id_to_token(token_id), token_id) for token_id in range(tokenizer.vocab_size)
    )
    return {name: token_id for name, token_id in names if name and name.startswith("<|")}


def _logprobs(output: CompletionOutput) -> list[float]:
    """Log-probabilities of the tokens, if they were asked for."""
    return [next(iter(each.values())).logprob for each in output.logprobs or ()]


def _params(asked: TranscriptionRequest) -> SamplingParams:
    return SamplingParams(
        **{name: getattr(asked, name) for name in same_names(TranscriptionRequest)},
        max_tokens=asked.max_completion_tokens,
        logprobs=0 if asked.response_format == "verbose_json" else None,
    )


async def _last(
    llm: AsyncLLM, prompt: PromptInput, params: SamplingParams, sent_as: dict[str, Any]
) -> CompletionOutput:
    """A request's last output."""
    last = None
    async with contextlib.aclosing(llm.generate(prompt, params, **sent_as)) as outputs:
        async for output in outputs:
            last = output
    assert last is not None, "a request has a last output"
    return last.outputs[0]


class _Hearing:
    """One request's windows, heard at once. `language`: of the first, if the model says it."""

    def __init__(
        self,
        llm: AsyncLLM,
        asked: TranscriptionRequest,
        task: str,
        exchange: Exchange,
        start: tuple[int, ...],
    ) -> None:
        self._llm = llm
        self._tokenizer = llm.get_tokenizer()
        self._asked = asked
        self._task = task
        self._exchange = exchange
        self._start = start
        self.language = asked.language
        self._ids = _marks(self._tokenizer)
        self._languages = {
            found[1]: token_id
            for text, token_id in self._ids.items()
            if (found := _LANGUAGE.fullmatch(text))
        }
        self._times = {
            token_id: float(found[1])
            for text, token_id in self._ids.items()
            if (found := _TIME.fullmatch(text))
        }
        self._wants_times = bool(self._times) and (
            asked.response_format in ("srt", "vtt", "verbose_json")
        )
        if asked.language is not None and asked.language not in self._languages:
            known = ", ".join(sorted(self._languages)) or "none, as it hears one only"
            raise ApiError(
                400,
                f"language is {asked.language!r}, the model knows {known}; give one of those",
                param="language",
            )
        if task == "translate" and "<|translate|>" not in self._ids:
            raise ApiError(400, f"the model has no task {task!r}; use /v1/audio/transcriptions")

    async def all_of(self, windows: list[_Window]) -> list[TranscribedSegment]:
        if self.language is None and len(self._languages) > 1 and windows:
            self.language = await self._detect(windows[0])
        parts = await asyncio.gather(*(self._hear(window) for window in windows))
        segments = [segment for part in parts for segment in part]
        return [msgspec.structs.replace(each, id=n) for n, each in enumerate(segments)]

    async def _detect(self, window: _Window) -> str | None:
        """The likeliest language behind the start, as Whisper detects it."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=sorted(self._languages.values())
        )
        (token_id,) = (await self._generate(window, [], params)).token_ids
        return next((name for name, own in self._languages.items() if own == token_id), None)

    async def _hear(self, window: _Window) -> list[TranscribedSegment]:
        asked = self._asked
        start = await read_texts(self._decoder_start, len(asked.prompt or ""))
        return self._segments(window, await self._generate(window, start, _params(asked)))

    async def _generate(
        self, window: _Window, start: list[int], params: SamplingParams
    ) -> CompletionOutput:
        prompt: EncoderDecoderPrompt = {
            "encoder_prompt": {"multi_modal_data": {"audio": (window.samples, window.rate)}},
            "decoder_prompt": {"prompt_token_ids": start},
        }
        return await _last(self._llm, prompt, params, self._exchange.sent_as(self._asked.user))

    def _decoder_start(self) -> list[int]:
        """What was said before, the model's start, language, task, and whether it gives times."""
        ids, own = self._ids, list(self._start)
        before: list[int] = []
        if self._asked.prompt and "<|startofprev|>" in ids:
            text = " " + self._asked.prompt.strip()
            said = self._llm.input_processor.encode(text, add_special_tokens=False, is_cut=True)
            before = [ids["<|startofprev|>"], *said[-(self._llm.model.max_model_len // 2 - 1) :]]
        if self.language is not None and self.language in self._languages:
            own += [self._languages[self.language]]
            own += [ids[name] for name in (f"<|{self._task}|>",) if name in ids]
        if not self._wants_times and "<|notimestamps|>" in ids:
            own.append(ids["<|notimestamps|>"])
        return before + own

    # ------------------------------------------------------------------ what it says

    def _segments(self, window: _Window, output: CompletionOutput) -> list[TranscribedSegment]:
        """Its text between two times each, or all of it."""
        logprobs = _logprobs(output)
        spans: list[tuple[float, float, list[int], list[float]]] = []
        start, tokens, values = 0.0, list[int](), list[float]()
        for place, token_id in enumerate(output.token_ids):
            told = self._times.get(token_id)
            time = start if told is None else max(start, told)
            if told is None:
                tokens.append(token_id)
                values += logprobs[place : place + 1]
            elif not self._wants_times:
                continue
            elif tokens:
                spans.append((start, time, tokens, values))
                start, tokens, values = time, [], []
            else:
                start = time
        if tokens:
            spans.append((start, window.duration, tokens, values))
        return [
            TranscribedSegment(
                id=0,
                start=round(window.start + min(begin, window.duration), 2),
                end=round(window.start + min(max(begin, end), window.duration), 2),
                text=text,
                tokens=own,
                temperature=self._asked.temperature,
                avg_logprob=sum(own_values) / len(own_values) if own_values else 0.0,
            )
            for begin, end, own, own_values in spans
            if (text := self._tokenizer.decode(own))
        ]


class _Asking:
    """One request's windows, for a decoder that a prompt asks for their transcripts. `language`: of
    the first, if the model says it."""

    def __init__(
        self,
        llm: AsyncLLM,
        asked: TranscriptionRequest,
        task: str,
        exchange: Exchange,
        family: "AudioFamily",
    ) -> None:
        self._llm = llm
        self._asked = asked
        self._exchange = exchange
        self._family = family
        self._text = family.transcript_prompt(asked.language, asked.prompt)
        self.language = asked.language
        if task == "translate":
            raise ApiError(400, f"the model has no task {task!r}; use /v1/audio/transcriptions")
        if asked.response_format in ("srt", "vtt"):
            raise ApiError(
                400,
                f"response_format is {asked.response_format!r}, and the model gives no times; use "
                "json, text or verbose_json",
                param="response_format",
            )

    async def all_of(self, windows: list[_Window]) -> list[TranscribedSegment]:
        heard = await asyncio.gather(*(self._hear(window) for window in windows))
        self.language = self.language or next((found for found, _ in heard if found), None)
        segments = [segment for _, segment in heard if segment.text]
        return [msgspec.structs.replace(each, id=n) for n, each in enumerate(segments)]

    async def _hear(self, window: _Window) -> tuple[str | None, TranscribedSegment]:
        items = [MediaItem("audio", (window.samples, window.rate), "file")]
        read = functools.partial(self._llm.input_processor.chat_tokens, self._text, items)
        prompt = await in_thread(read, decodes=True)
        sent_as = self._exchange.sent_as(self._asked.user)
        output = await _last(self._llm, prompt, _params(self._asked), sent_as)
        language, text = self._family.transcript_of(output.text)
        logprobs = _logprobs(output)
        return language, TranscribedSegment(
            id=0,
            start=round(window.start, 2),
            end=round(window.start + window.duration, 2),
            text=text,
            tokens=list(output.token_ids),
            temperature=self._asked.temperature,
            avg_logprob=sum(logprobs) / len(logprobs) if logprobs else 0.0,
        )
