"""Ollama's routes."""

from __future__ import annotations

from frontend.http.ollama.generation import chat, generate
from frontend.http.ollama.lines import LineStream
from frontend.http.ollama.models import ps, pull, show, tags, version
from frontend.http.ollama.requests import ChatRequest, GenerateRequest, ModelRequest
from frontend.http.ollama.responses import (
    ApiVersion,
    ChatAnswer,
    GenerateAnswer,
    LoadedModels,
    ModelEntries,
    ShownModel,
    Status,
)
from frontend.http.openai.models import embed
from frontend.http.operations import Operation

OPERATIONS = [
    Operation(
        method="POST",
        path="/api/chat",
        handler=chat,
        takes=ChatRequest,
        gives=ChatAnswer,
        event=ChatAnswer,
        event_media_type=LineStream.media_type,
    ),
    Operation(
        method="POST",
        path="/api/generate",
        handler=generate,
        takes=GenerateRequest,
        gives=GenerateAnswer,
        event=GenerateAnswer,
        event_media_type=LineStream.media_type,
    ),
    Operation(method="GET", path="/api/tags", handler=tags, gives=ModelEntries),
    Operation(method="GET", path="/api/ps", handler=ps, gives=LoadedModels),
    Operation(method="POST", path="/api/show", handler=show, takes=ModelRequest, gives=ShownModel),
    Operation(
        method="POST",
        path="/api/pull",
        handler=pull,
        takes=ModelRequest,
        gives=Status,
        event=Status,
        event_media_type=LineStream.media_type,
    ),
    Operation(method="POST", path="/api/embed", handler=embed),
    Operation(method="POST", path="/api/embeddings", handler=embed),
    Operation(method="GET", path="/api/version", handler=version, gives=ApiVersion),
]
