"""Bodies of Ollama's answers. Durations are in nanoseconds."""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from frontend.http.ollama.requests import OllamaCall
from frontend.http.openai.responses import TokenLogprob


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an answer, or all of it; with the last part come `done_reason` and the figures."""

    model: str
    created_at: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ChatAnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class ChatAnswer(Answer, frozen=True, kw_only=True):
    message: ChatAnswerMessage


class GenerateAnswer(Answer, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`size` is that of the files, or of what is in memory, in bytes; 0: the server does not know
    it."""

    name: str
    model: str
    modified_at: datetime
    size: int = 0
    digest: str
    details: ModelDetails


class ModelEntries(msgspec.Struct, frozen=True, kw_only=True):
    models: list[ModelEntry]


class LoadedModel(ModelEntry, frozen=True, kw_only=True):
    expires_at: datetime
    """If nobody uses it until then."""
    size_vram: int = 0
    context_length: int


class LoadedModels(msgspec.Struct, frozen=True, kw_only=True):
    models: list[LoadedModel]


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`completed` and `total` are bytes."""

    status: str
    completed: int | UnsetType = UNSET
    total: int | UnsetType = UNSET


class ApiVersion(msgspec.Struct, frozen=True):
    version: str
