"""OpenAI's routes."""

from __future__ import annotations

from frontend.http.openai.chat import chat_completions
from frontend.http.openai.completions import completions
from frontend.http.openai.models import embed, get_model, list_models
from frontend.http.openai.requests import ChatCompletionRequest, CompletionRequest
from frontend.http.openai.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelCard,
    ModelList,
)
from frontend.http.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    detokenize,
    tokenize,
)
from frontend.http.operations import Operation

OPERATIONS = [
    Operation(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        takes=ChatCompletionRequest,
        gives=ChatCompletion,
        event=ChatCompletionChunk,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        handler=completions,
        takes=CompletionRequest,
        gives=Completion,
        event=Completion,
    ),
    Operation(method="GET", path="/v1/models", handler=list_models, gives=ModelList),
    Operation(method="GET", path="/v1/models/{name:path}", handler=get_model, gives=ModelCard),
    Operation(method="POST", path="/v1/embeddings", handler=embed),
    Operation(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        takes=TokenizeRequest,
        gives=TokenizeResponse,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        takes=DetokenizeRequest,
        gives=DetokenizeResponse,
    ),
]
