"""Bodies of Ollama's requests. A field or option that is not here is refused by name; one whose
type allows a single value has only that."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.http.openai.requests import Tool

Nothing = Literal[""] | Annotated[list[Any], Meta(max_length=0)] | None
"""What clients send for "not used"."""


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """None: the model's own default, else Ollama's."""

    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens of prompt and answer together."""
    num_predict: Annotated[int, Meta(ge=-2)] | None = None
    """Below 1: as many as there is room for."""
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0)] | None = None
    repeat_last_n: Literal[-1] | None = None
    """Penalties look at all tokens."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop: str | list[str] | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    """Of no effect without `mirostat`, as is `mirostat_eta`."""
    mirostat_eta: float | None = None
    num_gpu: int | None = None
    """Of no effect, as what follows: the daemon has loaded the model; no answer changes."""
    main_gpu: int | None = None
    num_thread: int | None = None
    num_batch: int | None = None
    num_keep: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    numa: bool | None = None
    tfs_z: Annotated[float, Meta(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Meta(ge=1, le=1)] | None = None


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and generate share."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = True
    options: Options | None = None
    keep_alive: int | float | str | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None


class GenerateRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    """Without one the model is only loaded."""
    system: str | None = None
    context: list[int] | None = None
    """Of the answer before."""
    raw: bool | None = None
    """The prompt goes to the model as it is."""
    suffix: Nothing = None
    template: Nothing = None
    images: Nothing = None


class OllamaFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: dict[str, Any]
    index: int = 0


class OllamaCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """In answers too."""

    id: str = ""
    function: OllamaFunction


class ConversationMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Nothing = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: list[ConversationMessage] | None = None
    """Without any the model is only loaded."""
    tools: list[Tool] | None = None


class ModelRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show and /api/pull. `name` is the older `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    """Of no effect: there is nothing more to show."""
    stream: bool | None = True
    insecure: Literal[False] | None = None
    system: Nothing = None
    template: Nothing = None
    options: dict[str, Any] | None = None
    """Of no effect, as in Ollama."""
    username: Nothing = None
    password: Nothing = None
