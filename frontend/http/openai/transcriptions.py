"""POST /v1/audio/transcriptions and /v1/audio/translations, by Whisper's models."""

import asyncio
import contextlib
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import json_response, until_disconnect
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.generation.parameters import same_names
from frontend.http.operations import operation
from frontend.http.served_models import served_models
from frontend.inputs.encoder_prompts import EncoderDecoderPrompt, EncoderPrompts
from frontend.multimodal.media import in_thread
from frontend.outputs import CompletionOutput
from frontend.sampling_params import SamplingParams
from frontend.text.long_texts import read_texts
from frontend.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from frontend.multimodal.audio import Floats

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TIME = re.compile(r"<\|(\d+\.\d\d)\|>")
_QUIET_S, _CUT_S = 0.1, 1.0
"""A sound is cut where so long a part of the last second of a window is the quietest."""


class TranscriptionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of the form beside `file`."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = 0.0
    timestamp_granularities: list[Literal["segment"]] | None = None
    chunking_strategy: Literal["auto"] | None = None
    stream: Literal[False] = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_completion_tokens: int | None = None
    user: str | None = None


class DurationUsage(msgspec.Struct, kw_only=True):
    type: str = "duration"
    seconds: int


class Transcription(msgspec.Struct, kw_only=True):
    text: str
    usage: DurationUsage


class TranscribedSegment(msgspec.Struct, kw_only=True):
    """`start`, `end` in seconds."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float


class VerboseTranscription(msgspec.Struct, kw_only=True):
    """`json` has `text` and `usage` of it."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscribedSegment]
    usage: DurationUsage


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
    encoder = llm.input_processor.encoder_prompts
    if encoder is None or encoder.modality != "audio":
        raise ApiError(
            400,
            f"model {exchange_of(request).model!r} does not transcribe; serve one of Whisper's",
            param="model",
        )
    windows = await in_thread(functools.partial(_windows, encoder, data), decodes=True)
    hearing = _Hearing(llm, asked, task, exchange_of(request), encoder.start_token_ids)
    segments = await until_disconnect(request, hearing.all_of(windows))
    duration = sum(window.duration for window in windows)
    return _in_format(asked, task, hearing.language or "", segments, duration)


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
        raise ApiError(400, f"{what}; /openapi.json and docs/http.md list what is") from None


# ---------------------------------------------------------------------- what the model hears


def _windows(encoder: EncoderPrompts, data: bytes) -> list[_Window]:
    """Raises InvalidInput: no sound."""
    log_mel = encoder.log_mel()  # says what to install if numpy is missing
    from frontend.multimodal.audio import load_audio, quietest

    rate, size = log_mel.sampling_rate, log_mel.num_samples
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
        params = SamplingParams(
            **{name: getattr(asked, name) for name in same_names(TranscriptionRequest)},
            max_tokens=asked.max_completion_tokens,
            logprobs=0 if asked.response_format == "verbose_json" else None,
        )
        return self._segments(window, await self._generate(window, start, params))

    async def _generate(
        self, window: _Window, start: list[int], params: SamplingParams
    ) -> CompletionOutput:
        prompt: EncoderDecoderPrompt = {
            "encoder_prompt": {"multi_modal_data": {"audio": (window.samples, window.rate)}},
            "decoder_prompt": {"prompt_token_ids": start},
        }
        outputs = self._llm.generate(prompt, params, **self._exchange.sent_as(self._asked.user))
        last = None
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                last = output
        assert last is not None, "a request has a last output"
        return last.outputs[0]

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
        logprobs = [next(iter(each.values())).logprob for each in output.logprobs or ()]
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


def _in_format(
    asked: TranscriptionRequest,
    task: str,
    language: str,
    segments: list[TranscribedSegment],
    duration: float,
) -> Response:
    text = "".join(
        each.text if each.text.startswith(" ") else f" {each.text}" for each in segments
    ).strip()
    usage = DurationUsage(seconds=-int(-duration // 1))
    match asked.response_format:
        case "text":
            return PlainTextResponse(text + "\n")
        case "srt":
            return PlainTextResponse("".join(_cue(each, ",", number=True) for each in segments))
        case "vtt":
            cues = "".join(_cue(each, ".", number=False) for each in segments)
            return PlainTextResponse(f"WEBVTT\n\n{cues}")
        case "verbose_json":
            return json_response(
                VerboseTranscription(
                    task=task,
                    language="en" if task == "translate" else language,
                    duration=round(duration, 2),
                    text=text,
                    segments=segments,
                    usage=usage,
                )
            )
    return json_response(Transcription(text=text, usage=usage))


def _cue(segment: TranscribedSegment, point: str, *, number: bool) -> str:
    times = " --> ".join(_clock(each, point) for each in (segment.start, segment.end))
    head = f"{segment.id + 1}\n" if number else ""
    return f"{head}{times}\n{segment.text.strip()}\n\n"


def _clock(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{thousandths:03}"
