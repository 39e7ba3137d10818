"""Bodies of /v1/responses. What is not a field of the request is refused by name."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.http.generation.requests import Count

Part = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ItemType = Literal[
    "message", "reasoning", "compaction", "item_reference", "additional_tools",
    "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
    "apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output",
    "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
]  # fmt: skip
Include = Literal[
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs", "reasoning.encrypted_content", "message.output_text.logprobs",
]  # fmt: skip


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a conversation, whose `type` says which of the fields it has; answers are sent
    back so. Clients add notes of their own to items: further fields are passed over."""

    type: ItemType = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = None
    """A message's role: user, assistant, system or developer."""
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    tools: list[dict[str, Any]] | None = None
    server_label: str | None = None
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None
    error: str | dict[str, Any] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A schema is always enforced, so `strict` is of no effect, as are name and description."""

    type: str = msgspec.field(default_factory=lambda: "text")
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = msgspec.field(name="schema", default=None)
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat = msgspec.field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None
    """Taken and of no effect."""


Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """The answer says null where the chat template reads none."""
    summary: Summary | None = None
    """The reasoning comes whole, as the summary."""
    generate_summary: Summary | None = None
    """The older name of `summary`."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ObfuscationOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_obfuscation: Literal[False] | None = None


class BackgroundOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    completion_window: Literal["soonest"] | None = None
    unread_timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """Ours: seconds after which it is cancelled while nobody reads its stream."""


class ImageOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    context_compression: Literal["auto", "disabled"] | None = None


class PromptCacheOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Taken and of no effect: every prompt is cached."""

    mode: Literal["implicit"] | None = None
    ttl: str | None = None
    prewarm: Literal[False] | None = None


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
    background: bool | None = None
    """Answered without its caller: see GET /v1/responses/{id}."""
    background_options: BackgroundOptions | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    """Bounds tools that this server runs."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    """By type: function, custom, namespace, local_shell, shell, apply_patch, tool_search, and mcp
    of servers that --mcp names; others are run by nobody here."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: of a conversation that is too long the oldest items are left out."""
    include: list[Include] | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    """Taken and of no effect, as is `metadata`, which the answer repeats."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Its session, where several engines serve the model; every prompt is cached."""
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    image: ImageOptions | None = None
    service_tier: (
        Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None
    ) = None
    """Taken and of no effect: there is one, `default`."""
    stream_options: ObfuscationOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    """Needs `include` of message.output_text.logprobs."""
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


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text", kw_only=True):
    text: str


TextPart = OutputText | ReasoningText | SummaryText


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: ItemStatus
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None
    """Our form of the text, where it was asked for."""


class CallItem(msgspec.Struct, tag_field="type", kw_only=True):
    """Fields that all items of calls share."""

    id: str
    status: ItemStatus
    call_id: str


class FunctionCallItem(CallItem, tag="function_call", kw_only=True):
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomToolCallItem(CallItem, tag="custom_tool_call", kw_only=True):
    name: str
    namespace: str | UnsetType = UNSET
    input: str


class LocalShellCallItem(CallItem, tag="local_shell_call", kw_only=True):
    action: dict[str, Any]


class ShellCallItem(CallItem, tag="shell_call", kw_only=True):
    action: dict[str, Any]


class ApplyPatchCallItem(CallItem, tag="apply_patch_call", kw_only=True):
    operation: dict[str, Any]


class ToolSearchCallItem(CallItem, tag="tool_search_call", kw_only=True):
    execution: Literal["client"] = "client"
    arguments: dict[str, Any]


class McpCallItem(msgspec.Struct, tag_field="type", tag="mcp_call", kw_only=True):
    """A call that this server runs, with its result or what went wrong."""

    id: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    server_label: str
    name: str
    arguments: str
    approval_request_id: str | None = None
    output: str | None = None
    error: dict[str, Any] | None = None


class McpApprovalItem(msgspec.Struct, tag_field="type", tag="mcp_approval_request", kw_only=True):
    """A call that is run when an item `mcp_approval_response` names this one's id."""

    id: str
    server_label: str
    name: str
    arguments: str


class McpListToolsItem(msgspec.Struct, tag_field="type", tag="mcp_list_tools", kw_only=True):
    id: str
    server_label: str
    tools: list[dict[str, Any]]
    error: str | None = None


OutputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomToolCallItem
    | LocalShellCallItem
    | ShellCallItem
    | ApplyPatchCallItem
    | ToolSearchCallItem
    | McpCallItem
    | McpApprovalItem
    | McpListToolsItem
)


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


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
    completed_at: int | None = None
    status: Literal[
        "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
    ] = "in_progress"  # fmt: skip
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    prompt_cache_key: str | None = None
    reasoning: ReasoningOptions
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
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
    summary_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: TextPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[Part] | UnsetType = UNSET


class InputItemList(msgspec.Struct, kw_only=True):
    """A page of the items that a response answers."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
