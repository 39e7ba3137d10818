"""Bodies of Anthropic's requests, whose fields and kinds of blocks that are not here are refused by
name, and of answers: a message, and the events that make one."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of no effect: the engine caches every prompt, and evicts what was used longest ago."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    cache_control: CacheControl | None = None


class TextBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="text"):
    text: str


class ImageSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["base64", "url"]
    media_type: str = "image"
    data: str = ""
    url: str = ""
    """A data URL, or the URL of a file that the server allows."""


class ImageBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="image"):
    source: ImageSource


class ThinkingBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="thinking"):
    """The thinking of an earlier answer. The signature is not checked."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block, forbid_unknown_fields=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    """Whether the tool failed; of no effect: the text says it to the model."""


Block = TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    """user, assistant or system."""
    content: str | list[Block]


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """Its input follows the schema."""
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Taken and of no effect: arguments are always streamed as they come."""


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    """A target: thinking ends when the model ends it, at `max_tokens` at the latest."""
    display: Literal["summarized"] | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = msgspec.field(name="schema")


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: JsonSchemaFormat | None = None


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
    cache_control: CacheControl | None = None


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
    """None: it is not checked when it comes back."""


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


class InputJsonDelta(_Event, frozen=True, kw_only=True, tag="input_json_delta"):
    """A part of the text of a call's arguments."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | InputJsonDelta


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


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
"""One event of a stream. Another is `AnthropicErrorResponse`, with the name "error"."""
