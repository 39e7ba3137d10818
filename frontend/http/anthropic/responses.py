"""Bodies of Anthropic's answers: a message, and the events that make one."""

from typing import Any, Literal

import msgspec

from frontend.http.error_forms import AnthropicErrorResponse


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


class ContentBlockDelta(_Event, frozen=True, kw_only=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


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


def named(body: Any) -> str:
    """The name of an event."""
    if isinstance(body, AnthropicErrorResponse):
        return body.type
    return str(body.__struct_config__.tag)
