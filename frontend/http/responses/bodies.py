"""Bodies of /v1/responses. What is not a field here is refused by name."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.http.generation.requests import Count, FunctionDefinition

Part = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message, a call, its result or a reasoning; also what answers hold, as it is sent back."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = None
    """A message's role: user, assistant, system or developer."""
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


class FunctionTool(
    FunctionDefinition, forbid_unknown_fields=True, kw_only=True, omit_defaults=False
):
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A schema is always enforced, so `strict` is of no effect, as are name and description."""

    type: str = msgspec.field(default_factory=lambda: "text")
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = msgspec.field(name="schema", default=None)
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat = msgspec.field(default_factory=TextFormat)
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    """The reasoning comes whole."""


class ObfuscationOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses. Fields beside OpenAI's have vLLM's names."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    """Instructions for this answer only: the next one does not inherit them."""
    previous_response_id: str | None = None
    store: bool | None = None
    """Default: true."""
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Of no effect: reasoning comes as text, and may be sent back so."""
    background: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Taken and of no effect: every prompt is cached."""
    service_tier: Literal["auto", "default"] | None = None
    stream_options: ObfuscationOptions | None = None
    top_logprobs: Literal[0] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    text: str
    annotations: list[Part] = []
    logprobs: list[Part] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", kw_only=True):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: ItemStatus
    summary: list[Part] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """An answer, and what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    reasoning: ReasoningOptions
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream; `type` says which fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Part] | UnsetType = UNSET
