"""Items of the Responses API to messages of a conversation."""

from collections.abc import Sequence
from typing import Any

from frontend.http.api_errors import ApiError
from frontend.http.generation.conversation import check_role
from frontend.http.generation.requests import AssistantToolCall, CalledFunction, ChatMessage
from frontend.http.responses.bodies import InputItem, Part

_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")

_ROLES = ("user", "assistant", "system", "developer")


def append_items(messages: list[ChatMessage], items: Sequence[InputItem]) -> None:
    """Calls and reasoning become parts of the assistant's message that they belong to.

    Raises:
        ApiError: an item without what its type needs, or content that is not text.
    """
    reasoning = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.type:
            case "reasoning":
                reasoning = _joined(f"{where}.content", item.content or item.summary or "")
            case "message":
                role = _given(f"{where}.role", item.role)
                check_role(role, f"{where}.role", known=_ROLES)
                given = _given(f"{where}.content", item.content)
                content = _texts(f"{where}.content", given, takes_images=True)
                own = reasoning if role == "assistant" else None
                messages.append(ChatMessage(role=role, content=content, reasoning=own))
                reasoning = None
            case "function_call":
                function = CalledFunction(
                    name=_given(f"{where}.name", item.name),
                    arguments=_given(f"{where}.arguments", item.arguments),
                )
                call = AssistantToolCall(
                    id=_given(f"{where}.call_id", item.call_id), function=function
                )
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant", reasoning=reasoning))
                    reasoning = None
                calls = messages[-1].tool_calls or []
                calls.append(call)
                messages[-1].tool_calls = calls
            case "function_call_output":
                output = _texts(f"{where}.output", _given(f"{where}.output", item.output))
                call_id = _given(f"{where}.call_id", item.call_id)
                messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=output))


def _given(name: str, value: Any) -> Any:
    if value is None:
        raise ApiError(400, f"{name} is missing", param=name)
    return value


def _texts(name: str, content: str | list[Part], *, takes_images: bool = False) -> str | list[Part]:
    """The parts as chat completions have them."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if takes_images and part.get("type") == "input_image":
            texts.append(part)
            continue
        if part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise ApiError(
                400,
                f"{name}[{index}] is of type {part.get('type')!r}, which is not supported; send "
                "parts of type 'input_text'",
                param=f"{name}[{index}]",
            )
        texts.append({"type": "text", "text": part["text"]})
    return texts


def _joined(name: str, content: str | list[Part]) -> str:
    texts = _texts(name, content)
    return texts if isinstance(texts, str) else "".join(part["text"] for part in texts)
