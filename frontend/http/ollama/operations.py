"""Ollama's routes."""

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
        "POST",
        "/api/chat",
        chat,
        ChatRequest,
        ChatAnswer,
        ChatAnswer,
        event_media_type=LineStream.media_type,
    ),
    Operation(
        "POST",
        "/api/generate",
        generate,
        GenerateRequest,
        GenerateAnswer,
        GenerateAnswer,
        event_media_type=LineStream.media_type,
    ),
    Operation("GET", "/api/tags", tags, gives=ModelEntries),
    Operation("GET", "/api/ps", ps, gives=LoadedModels),
    Operation("POST", "/api/show", show, ModelRequest, ShownModel),
    Operation(
        "POST",
        "/api/pull",
        pull,
        ModelRequest,
        Status,
        Status,
        event_media_type=LineStream.media_type,
    ),
    Operation("POST", "/api/embed", embed),
    Operation("POST", "/api/embeddings", embed),
    Operation("GET", "/api/version", version, gives=ApiVersion),
]
