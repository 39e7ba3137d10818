"""What a transcription is asked with, and the forms of its answer."""

from typing import Literal

import msgspec
from starlette.responses import PlainTextResponse, Response

from frontend.http.event_stream import json_response


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


def in_format(
    asked: TranscriptionRequest,
    task: str,
    language: str,
    segments: list[TranscribedSegment],
    duration: float,
) -> Response:
    """The answer in the form that was asked for. `duration`: of the sound, in seconds."""
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
