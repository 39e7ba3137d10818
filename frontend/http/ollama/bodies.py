"""Bodies of Ollama's requests and answers. A field or option of a request that is not here is
refused by name; one whose type allows a single value has only that. Durations: nanoseconds."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.http.generation.answer_bodies import TokenLogprob
from frontend.http.generation.requests import Tool
from protocol.presets import Parameters, PresetMessage

Nothing = Literal[""] | Annotated[list[Any], Meta(max_length=0)] | None
"""The values that clients send for "not used"."""


class Options(Parameters, forbid_unknown_fields=True, kw_only=True):
    """None: the model's own default, else Ollama's."""

    mirostat: Literal[0] | Annotated[float, Meta(ge=0, le=0)] | None = None
    mirostat_tau: float | None = None
    """Taken and of no effect without `mirostat`, as is `mirostat_eta`."""
    mirostat_eta: float | None = None
    num_keep: int | float | None = None
    """How many tokens at the start of a prompt stay if it is cut."""
    num_gpu: int | float | None = None
    """Of no effect, as what follows: the daemon has loaded the model; no answer changes."""
    main_gpu: int | float | None = None
    num_thread: int | float | None = None
    num_batch: int | float | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None
    penalize_newline: Literal[True] | None = None
    numa: bool | None = None
    tfs_z: Annotated[float, Meta(ge=1, le=1)] | None = None


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that chat and generate share."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = True
    options: Options | None = None
    keep_alive: int | float | str | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """Default: a model that can think does."""
    truncate: bool | None = None
    """Default: a prompt that is longer than the context is shortened."""
    shift: bool | None = None
    """True: where the context is full its oldest half is left out, and the answer goes on."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    vllm_xargs: dict[str, Any] | None = None
    """`extra_args` for the engine's logits processors."""


class GenerateRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    """The prompt; without one the model is only loaded."""
    system: str | None = None
    context: list[int] | None = None
    """The context that the answer before gave."""
    raw: bool | None = None
    """The prompt goes to the model as it is."""
    suffix: str | Annotated[list[Any], Meta(max_length=0)] | None = None
    """The text behind the gap that is filled; empty: there is none."""
    template: str | None = None
    """Jinja2, in place of the model's."""
    images: list[str] | None = None
    """base64."""


class OllamaFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: dict[str, Any]
    index: int = 0


class OllamaCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call, in messages and in answers."""

    id: str = ""
    function: OllamaFunction


class ConversationMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """base64."""
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: list[ConversationMessage] | None = None
    """The conversation; without one the model is only loaded."""
    tools: list[Tool] | None = None


class ModelRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show and /api/pull, DELETE /api/delete. `name` is the older `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    """Whether the vocabulary is shown, too."""
    stream: bool | None = True
    insecure: Literal[False] | None = None
    system: Nothing = None
    template: Nothing = None
    options: dict[str, Any] | None = None
    """Taken and of no effect, as in Ollama."""
    username: Nothing = None
    password: Nothing = None


class CreateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/create."""

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(name="from", default=None)
    """A model or preset that this server serves."""
    system: str | None = None
    template: str | None = None
    """Jinja2."""
    license: str | list[str] | None = None
    parameters: Parameters | None = None
    messages: list[PresetMessage] | None = None
    stream: bool | None = True
    files: dict[str, str] | None = None
    """Names and digests of blobs: a .gguf file, or a folder of safetensors files."""
    adapters: dict[str, str] | None = None
    """The same of an adapter: a .gguf file, or a folder of PEFT's."""
    quantize: str | None = None
    """Refused."""


class CopyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/copy."""

    source: str
    destination: str


# ---------------------------------------------------------------------- answers


class OllamaAnswer(msgspec.Struct, frozen=True, kw_only=True):
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
    truncated_messages: int | UnsetType = UNSET
    """Messages that the model has not seen, as is `truncated_tokens`: the context was full."""
    truncated_tokens: int | UnsetType = UNSET
    num_ctx: int | UnsetType = UNSET
    """The context, where `options.num_ctx` asked for a longer one."""


class ChatAnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class ChatAnswer(OllamaAnswer, frozen=True, kw_only=True):
    message: ChatAnswerMessage


class GenerateAnswer(OllamaAnswer, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class AnyEmbedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1)]
    truncate: bool | None = None
    """Default: texts are cut to the model's length."""
    dimensions: int | None = None
    keep_alive: int | float | str | None = None
    options: Options | None = None
    """Of no effect on a vector, but for `num_ctx`: most tokens of a text."""


class EmbedRequest(AnyEmbedRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed."""

    input: str | list[str]


class OldEmbedRequest(AnyEmbedRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings."""

    prompt: str


class EmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedAnswer(msgspec.Struct, frozen=True):
    embedding: list[float]


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
    """When its engine is stopped if nobody uses it until then."""
    size_vram: int = 0
    context_length: int


class LoadedModels(msgspec.Struct, frozen=True, kw_only=True):
    models: list[LoadedModel]


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    system: str | UnsetType = UNSET
    license: str | UnsetType = UNSET
    messages: list[PresetMessage] | UnsetType = UNSET
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`completed` and `total` are bytes."""

    status: str
    digest: str | UnsetType = UNSET
    completed: int | UnsetType = UNSET
    total: int | UnsetType = UNSET


class ApiVersion(msgspec.Struct, frozen=True):
    version: str
