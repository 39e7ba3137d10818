"""Ollama's streams: one JSON document a line."""

import msgspec

from frontend.http.api_errors import ApiError
from frontend.http.error_forms import OllamaErrorResponse
from frontend.http.event_stream import EventStream


class LineStream(EventStream):
    media_type = "application/x-ndjson"


def line(body: msgspec.Struct) -> bytes:
    return msgspec.json.encode(body) + b"\n"


def error_line(error: ApiError) -> bytes:
    return line(OllamaErrorResponse(error.message))
