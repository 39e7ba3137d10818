"""Anthropic's conversations as chat completions have them."""

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from frontend.http.anthropic import bodies
from frontend.http.anthropic.signatures import omitted_thinking
from frontend.http.api_errors import ApiError
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
_BILLING = "x-anthropic-billing-header:"
"""How Claude Code begins a system text that is for the provider, and differs in every request."""


def chat_request(asked: bodies.CountTokensRequest) -> ChatCompletionRequest:
    """The same conversation, tools and format. A last message of the assistant is the beginning of
    the answer. Raises ApiError: a role that there is not, a tool without a schema."""
    choice = asked.tool_choice or bodies.ToolChoice(type="auto")
    chat = ChatCompletionRequest(
        messages=_chat_messages(asked),
        parallel_tool_calls=choice.disable_parallel_tool_use is not True,
        continue_final_message=asked.messages[-1].role == "assistant",
    )
    if choice.type != "none":
        tools = [_tool(each, index) for index, each in enumerate(asked.tools or ())]
        chat.tools = [each for each in tools if each is not None]
    if choice.type == "any":
        chat.tool_choice = "required"
    elif choice.type == "tool":
        chat.tool_choice = {"type": "function", "function": {"name": choice.name}}
    config = asked.output_config or bodies.OutputConfig()
    if (answer := config.format or asked.output_format) is not None:
        schema = JsonSchemaFormat(schema_=answer.schema_)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    return chat


@cache
def _client_tools() -> dict[str, dict[str, Any]]:
    """Descriptions and schemas of the provider's own tools that clients run."""
    text = Path(__file__).with_name("client_tools.json").read_text()
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def _tool(tool: bodies.Tool, index: int) -> Tool | None:
    """None: a search for tools, all of which the model sees."""
    kind = (tool.type or "custom").rpartition("_20")[0] or tool.type or "custom"
    if kind.startswith("tool_search"):
        return None
    known = _client_tools().get(kind, {})
    schema = known.get("input_schema") if tool.input_schema is None else tool.input_schema
    if schema is None:
        param = f"tools[{index}].input_schema"
        raise ApiError(400, f"{param} is missing; give it", param=param)
    description = tool.description or known.get("description", "")
    for example in tool.input_examples or ():
        description += "\nExample of input: " + json.dumps(example, ensure_ascii=False)
    return Tool(
        function=FunctionDefinition(
            name=tool.name, description=description, parameters=schema, strict=tool.strict
        )
    )


def _chat_messages(asked: bodies.CountTokensRequest) -> list[ChatMessage]:
    """Consecutive messages of one role are one turn, and results of tools are messages of theirs,
    as templates know them."""
    turns: list[list[dict[str, Any]]] = []
    if system := _system(asked.system or ""):
        turns.append([{"role": "system", "content": system}])
    first_thought = _first_thought(asked)
    last_user = max((i for i, each in enumerate(asked.messages) if each.role == "user"), default=0)
    for index, message in enumerate(asked.messages):
        check_role(message.role, f"messages[{index}].role", known=_ROLES)
        if message.clear_at == "next_user_message" and index < last_user:
            continue
        for made in _messages(message, keeps_thinking=index >= first_thought):
            if made["role"] == "system" and turns and turns[-1][0]["role"] != "system":
                made = {"role": "user", "content": _reminder(made["content"])}
            if turns and turns[-1][0]["role"] == made["role"] != "tool":
                turns[-1].append(made)
            else:
                turns.append([made])
    joined = [turn[0] if len(turn) == 1 else _joined(turn) for turn in turns]
    return msgspec.convert(joined, list[ChatMessage])


def _reminder(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A system text between others as a part of what the user says: most templates take it at the
    beginning alone."""
    first, last = "<system-reminder>", "</system-reminder>"
    if isinstance(content, str):
        return f"{first}\n{content}\n{last}"
    return [*_parts(first), *content, *_parts(last)]


def _system(given: str | Sequence[bodies.TextBlock]) -> str:
    if isinstance(given, str):
        return given
    return _text([block for block in given if not block.text.startswith(_BILLING)])


def _first_thought(asked: bodies.CountTokensRequest) -> int:
    """The first message whose thinking `context_management` keeps."""
    first = 0
    for edit in (asked.context_management or bodies.ContextManagement()).edits or ():
        keep = edit.keep or bodies.KeptThinking(type="thinking_turns")
        if isinstance(keep, bodies.KeptThinking) and keep.type == "thinking_turns":
            turns = [
                index
                for index, message in enumerate(asked.messages)
                if isinstance(message.content, list)
                and any(isinstance(block, bodies.ThinkingBlock) for block in message.content)
            ]
            first = max(first, turns[-keep.value] if len(turns) > keep.value else 0)
    return first


def _messages(message: bodies.InputMessage, *, keeps_thinking: bool) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    shown: list[bodies.ResultBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case bodies.ThinkingBlock():
                if keeps_thinking:
                    thoughts.append(block.thinking or omitted_thinking(block.signature))
            case bodies.RedactedThinkingBlock():
                pass
            case bodies.ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case bodies.ToolResultBlock():
                content = _content(block.content or "")
                results.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                )
            case _:
                shown.append(block)
    made: dict[str, Any] = {"role": message.role, "content": _content(shown)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return results if results and not shown else [*results, made]


def _plain(blocks: Sequence[bodies.ResultBlock]) -> Iterator[bodies.TextBlock | bodies.ImageBlock]:
    """Texts and images, with documents and results of a search between tags."""
    for block in blocks:
        match block:
            case bodies.DocumentBlock():
                source = block.source
                yield _opening("document", title=block.title, context=block.context)
                yield from _blocks(source.content if source.type == "content" else source.data)
                yield bodies.TextBlock(text="</document>")
            case bodies.SearchResultBlock():
                yield _opening("search_result", title=block.title, source=block.source)
                yield from block.content
                yield bodies.TextBlock(text="</search_result>")
            case bodies.ToolReferenceBlock():
                yield bodies.TextBlock(text=f"Found the tool {block.tool_name}.")
            case _:
                yield block


def _opening(tag: str, **attributes: str | None) -> bodies.TextBlock:
    given = "".join(
        f" {name}={json.dumps(text, ensure_ascii=False)}"
        for name, text in attributes.items()
        if text
    )
    return bodies.TextBlock(text=f"<{tag}{given}>")


def _blocks(
    content: str | list[bodies.TextBlock | bodies.ImageBlock],
) -> list[bodies.TextBlock | bodies.ImageBlock]:
    return [bodies.TextBlock(text=content)] if isinstance(content, str) else content


def _content(content: str | Sequence[bodies.ResultBlock]) -> str | list[dict[str, Any]]:
    """Text; parts, if an image is among them."""
    if isinstance(content, str):
        return content
    plain = [*_plain(content)]
    if not any(isinstance(block, bodies.ImageBlock) for block in plain):
        return _text(plain)
    parts: list[dict[str, Any]] = []
    for block in plain:
        if isinstance(block, bodies.ImageBlock):
            source = block.source
            url = source.url or f"data:{source.media_type};base64,{source.data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": block.text})
    return parts


def _text(content: Sequence[bodies.TextBlock | bodies.ImageBlock]) -> str:
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
