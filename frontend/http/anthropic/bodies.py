"""Bodies of Anthropic's requests, whose fields and kinds of blocks that are not here are refused by
name, and of answers: a message, and the events that make one."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A hint: the engine caches every prompt, and evicts what was used longest ago. With one
    anywhere the usage counts what was written to the cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    cache_control: CacheControl | None = None


class TextBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="text"):
    text: str
    citations: list[Any] | None = None
    """Citations of an earlier answer, from another server; of no effect."""


class ImageSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["base64", "url"]
    media_type: str = "image"
    data: str = ""
    url: str = ""
    """A data URL, or the URL of a file that the server allows."""


class Transformations(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    oversized_image: Literal["downsize"] | None = None


class ImageBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="image"):
    source: ImageSource
    transformations: Transformations | None = None


class ThinkingBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="thinking"):
    """The thinking of an earlier answer. The signature is not checked; it has the text where the
    answer was to be without."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(
    _Block, forbid_unknown_fields=True, kw_only=True, tag="redacted_thinking"
):
    """Thinking that only another server can read; left out."""

    data: str


class ToolUseBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    """The place of the call, of no effect: the model made it."""


class NoCitations(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    enabled: Literal[False] | None = None


class DocumentSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text, as `data`, or blocks; of PDFs the text is to be sent."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] | None = None
    data: str = ""
    content: str | list[TextBlock | ImageBlock] = ""


class DocumentBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="document"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: NoCitations | None = None


class SearchResultBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]
    citations: NoCitations | None = None


class ToolReferenceBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="tool_reference"):
    """A tool that a search has found. The model has seen all tools from the start."""

    tool_name: str


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    """Whether the tool failed; of no effect: the text says it to the model."""


Block = ResultBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    """user, assistant or system."""
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None
    """Of a system message: whether the next one of the user ends it."""


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    input_schema: dict[str, Any] | None = None
    """Of the provider's own kinds, which clients run, `client_tools.json` has it."""
    description: str | None = None
    type: (
        Literal[
            "custom",
            "bash_20250124",
            "text_editor_20250429",
            "text_editor_20250728",
            "memory_20250818",
            "tool_search_tool_regex",
            "tool_search_tool_regex_20251119",
            "tool_search_tool_bm25",
            "tool_search_tool_bm25_20251119",
        ]
        | None
    ) = None
    """A search for tools finds nothing that the model does not see."""
    strict: bool | None = None
    """Its input follows the schema."""
    input_examples: list[dict[str, Any]] | None = None
    """Shown behind the description."""
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Taken and of no effect: arguments are always streamed as they come."""
    defer_loading: bool | None = None
    """Taken and of no effect: the model sees every tool from the start."""
    allowed_callers: list[Literal["direct"]] | None = None
    max_characters: int | None = None
    """A text editor's own limit, which its client keeps."""


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The most tokens of thinking, where the model's marks of it are a token each; else a hint."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the text goes into the signature, and comes back with it."""
    block_binding: dict[str, Any] | None = None
    """Taken and of no effect: thinking that comes back is not checked."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = msgspec.field(name="schema")


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: JsonSchemaFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A hint, for chat templates that read `reasoning_effort`."""


class KeptThinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Meta(ge=1)] = 1


class ClearThinking(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="type",
    tag="clear_thinking_20251015",
):
    """Leaves thinking out of all answers but the last ones."""

    keep: KeptThinking | Literal["all"] | None = None
    """None: that of the last answer."""


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    edits: list[ClearThinking] | None = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """None: disabled, where the chat template can."""
    output_config: OutputConfig | None = None
    output_format: JsonSchemaFormat | None = None
    """The older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    """Servers of tools, which this server does not call."""
    speed: Literal["standard", "fast"] | None = None
    """A hint, as `inference_geo` is one: there is one engine, here."""
    inference_geo: str | None = None
    fallbacks: list[Any] | Literal["default"] | None = None
    """Taken and of no effect: no model declines for a policy."""


class Metadata(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    user_id: str | None = None
    """Divides its caller's share of the engine."""


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages. None: the model's own default."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    metadata: Metadata | None = None
    vllm_xargs: dict[str, Any] | None = None
    """`extra_args` for the engine's logits processors."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Taken and of no effect: there is one tier."""


# ---------------------------------------------------------------------- answers


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens of the prompt are `input_tokens` and those found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class AnswerText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class AnswerThinking(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class AnswerToolUse(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class Message(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class MessageStart(_Event, frozen=True, kw_only=True, tag="message_start"):
    message: Message


class ContentBlockStart(_Event, frozen=True, kw_only=True, tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(_Event, frozen=True, kw_only=True, tag="text_delta"):
    text: str


class ThinkingDelta(_Event, frozen=True, kw_only=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(_Event, frozen=True, kw_only=True, tag="signature_delta"):
    """The last one of a block of thinking."""

    signature: str


class InputJsonDelta(_Event, frozen=True, kw_only=True, tag="input_json_delta"):
    """A part of the text of a call's arguments."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(_Event, frozen=True, kw_only=True, tag="content_block_delta"):
    index: int
    delta: Delta


class ContentBlockStop(_Event, frozen=True, kw_only=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(_Event, frozen=True, kw_only=True, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(_Event, frozen=True, kw_only=True, tag="message_stop"):
    pass


class Ping(_Event, frozen=True, kw_only=True, tag="ping"):
    """Sent while there is nothing else to say."""


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
)
"""One event of a stream. Another is `AnthropicErrorResponse`, with the name "error"."""
