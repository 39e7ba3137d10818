"""OpenAI's routes."""

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
        "POST",
        "/v1/chat/completions",
        chat_completions,
        ChatCompletionRequest,
        ChatCompletion,
        ChatCompletionChunk,
    ),
    Operation("POST", "/v1/completions", completions, CompletionRequest, Completion, Completion),
    Operation("GET", "/v1/models", list_models, gives=ModelList),
    Operation("GET", "/v1/models/{name:path}", get_model, gives=ModelCard),
    Operation("POST", "/v1/embeddings", embed),
    Operation("POST", "/tokenize", tokenize, TokenizeRequest, TokenizeResponse),
    Operation("POST", "/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse),
]
