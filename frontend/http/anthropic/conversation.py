"""Anthropic's conversations as chat completions have them."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.http.anthropic import bodies
from frontend.http.generation.conversation import check_role
from frontend.http.generation.requests import (
    ChatCompletionRequest,
    ChatMessage,
    FunctionDefinition,
    JsonSchemaFormat,
    ResponseFormat,
    Tool,
)

_ROLES = ("user", "assistant", "system")


def chat_request(asked: bodies.CountTokensRequest) -> ChatCompletionRequest:
    """The same conversation, tools and format. A last message of the assistant is the beginning of
    the answer. Raises ApiError: a role that there is not."""
    choice = asked.tool_choice or bodies.ToolChoice(type="auto")
    chat = ChatCompletionRequest(
        messages=_chat_messages(asked),
        parallel_tool_calls=choice.disable_parallel_tool_use is not True,
        continue_final_message=asked.messages[-1].role == "assistant",
    )
    if choice.type != "none":
        chat.tools = [_tool(each) for each in asked.tools or ()]
    if choice.type == "any":
        chat.tool_choice = "required"
    elif choice.type == "tool":
        chat.tool_choice = {"type": "function", "function": {"name": choice.name}}
    if asked.output_config is not None and asked.output_config.format is not None:
        schema = JsonSchemaFormat(schema_=asked.output_config.format.schema_)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    return chat


def _tool(tool: bodies.Tool) -> Tool:
    return Tool(
        function=FunctionDefinition(
            name=tool.name,
            description=tool.description or "",
            parameters=tool.input_schema,
            strict=tool.strict,
        )
    )


def _chat_messages(asked: bodies.CountTokensRequest) -> list[ChatMessage]:
    """Consecutive messages of one role are one turn, and results of tools are messages of theirs,
    as templates know them."""
    turns: list[list[dict[str, Any]]] = []
    if asked.system:
        turns.append([{"role": "system", "content": _text(asked.system)}])
    for index, message in enumerate(asked.messages):
        check_role(message.role, f"messages[{index}].role", known=_ROLES)
        for made in _messages(message):
            if turns and turns[-1][0]["role"] == made["role"] != "tool":
                turns[-1].append(made)
            else:
                turns.append([made])
    joined = [turn[0] if len(turn) == 1 else _joined(turn) for turn in turns]
    return msgspec.convert(joined, list[ChatMessage])


def _messages(message: bodies.InputMessage) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    shown: list[bodies.Block] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case bodies.TextBlock() | bodies.ImageBlock():
                shown.append(block)
            case bodies.ThinkingBlock():
                thoughts.append(block.thinking)
            case bodies.ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case bodies.ToolResultBlock():
                content = _content(block.content or "")
                results.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                )
    made: dict[str, Any] = {"role": message.role, "content": _content(shown)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return results if results and not shown else [*results, made]


def _content(content: str | Sequence[bodies.Block]) -> str | list[dict[str, Any]]:
    """Text; parts, if an image is among them."""
    if not any(isinstance(block, bodies.ImageBlock) for block in content):
        return _text(content)
    parts = []
    for block in content:
        if isinstance(block, bodies.ImageBlock):
            source = block.source
            url = source.url or f"data:{source.media_type};base64,{source.data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif isinstance(block, bodies.TextBlock):
            parts.append({"type": "text", "text": block.text})
    return parts


def _text(content: str | Sequence[bodies.Block]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, bodies.TextBlock))


def _joined(turn: list[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    for message in turn:
        for name, value in message.items():
            values.setdefault(name, []).append(value)
    joined: dict[str, Any] = {"role": turn[0]["role"]}
    for name, several in values.items():
        if name == "tool_calls":
            joined[name] = [*itertools.chain(*several)]
        elif any(isinstance(value, list) for value in several):
            joined[name] = [*itertools.chain(*map(_parts, several))]
        elif name != "role":
            joined[name] = "\n".join(filter(None, several))
    return joined


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
