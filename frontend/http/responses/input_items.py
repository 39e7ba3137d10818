"""Items of the Responses API to messages of a conversation."""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from frontend.http.api_errors import ApiError
from frontend.http.generation.conversation import check_role
from frontend.http.generation.requests import AssistantToolCall, CalledFunction, ChatMessage
from frontend.http.responses.bodies import InputItem, Part
from frontend.http.responses.call_forms import visible_name

_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_SEALED = "engine-core:"
"""What our form of `encrypted_content` begins with; all else is another server's."""
_ACTIONS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
}
"""Names of functions, and fields of items that are their arguments."""

_RESULTS = (
    "function_call_output", "custom_tool_call_output", "local_shell_call_output",
    "shell_call_output", "apply_patch_call_output",
)  # fmt: skip
_PASSED_OVER = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
)  # fmt: skip


def sealed(text: str) -> str:
    """Reasoning as clients keep it that store nothing here. It is no secret from who asked."""
    return base64.b64encode((_SEALED + text).encode()).decode()


def _unsealed(content: str | None) -> str | None:
    """None: another server wrote it."""
    try:
        text = base64.b64decode(content or "", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(_SEALED) if text.startswith(_SEALED) else None


def conversation_of(
    items: Sequence[InputItem], pass_over: Callable[[str, object], None]
) -> list[ChatMessage]:
    """Calls and reasoning become parts of the assistant's message that they belong to.

    Args:
        pass_over: told where an item stands that means nothing to a model, and of which type it is.

    Raises:
        ApiError: an item without what its type needs, or content that is not text.
    """
    messages: list[ChatMessage] = []
    reasoning: str | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.type:
            case "reasoning":
                reasoning = (reasoning or "") + _reasoning(where, item)
            case "compaction":
                text = _given(f"{where}.encrypted_content", _unsealed(item.encrypted_content))
                messages.append(ChatMessage(role="user", content=text))
            case "message":
                role = _given(f"{where}.role", item.role)
                check_role(role, f"{where}.role", known=_ROLES)
                content = _texts(f"{where}.content", _given(f"{where}.content", item.content))
                own = reasoning if role == "assistant" else None
                messages.append(ChatMessage(role=role, content=content, reasoning=own))
                reasoning = None
            case "item_reference":
                what = f"{where}.id is {item.id!r:.100}, which is not kept here; send the item"
                raise ApiError(400, what, param=f"{where}.id")
            case "tool_search_output":
                names = [tool.get("name") for tool in item.tools or ()]
                _add_result(messages, where, item, f"tools that can be called now: {names}")
            case kind if kind in _RESULTS:
                output = item.status if item.type == "apply_patch_call_output" else None
                given = _given(f"{where}.output", output if item.output is None else item.output)
                if item.type == "shell_call_output" and not isinstance(given, str):
                    given = msgspec.json.encode(given).decode()
                _add_result(messages, where, item, _texts(f"{where}.output", given))
            case kind if kind in _PASSED_OVER:
                pass_over(f"{where}.type", kind)
            case "additional_tools" | "mcp_list_tools" | "mcp_approval_request":
                pass
            case "mcp_approval_response":
                if not _given(f"{where}.approve", item.approve):
                    _add_refused(messages, where, item, items)
            case _:
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant", reasoning=reasoning))
                    reasoning = None
                calls = messages[-1].tool_calls or []
                calls.append(_call(where, item))
                messages[-1].tool_calls = calls
                if item.type == "mcp_call":
                    result = item.output
                    if result is None and item.error is not None:
                        result = msgspec.json.encode(item.error).decode()
                    result = "This call was not run." if result is None else result
                    _add_result(messages, where, item, _texts(f"{where}.output", result))
    return messages


def _call(where: str, item: InputItem) -> AssistantToolCall:
    arguments: str | dict[str, Any]
    if item.type in _ACTIONS:
        name, field = _ACTIONS[item.type]
        action: Any = _given(f"{where}.{field}", getattr(item, field))
        if isinstance(action, dict) and item.type == "local_shell_call":
            action = {key: value for key, value in action.items() if key not in ("type", "env")}
        if isinstance(action, dict):
            action = {key: value for key, value in action.items() if value is not None}
        arguments = action
    else:
        group = item.server_label or item.namespace
        name = visible_name(group, _given(f"{where}.name", item.name))
        if item.type == "custom_tool_call":
            arguments = {"input": _given(f"{where}.input", item.input)}
        else:
            arguments = _given(f"{where}.arguments", item.arguments)
    call_id = _call_id(where, item)
    return AssistantToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))


def _call_id(where: str, item: InputItem) -> str:
    """The API calls it `id` where it has one name for the call and the item."""
    has_one = item.type in (
        "local_shell_call_output",
        "mcp_call",
        "mcp_approval_request",
    ) or item.type.startswith("tool_s")
    found = item.call_id or (item.id if has_one else None)
    return str(_given(f"{where}.call_id", found))


def _add_result(
    messages: list[ChatMessage], where: str, item: InputItem, content: str | list[Part]
) -> None:
    call_id = _call_id(where, item)
    messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=content))


def _add_refused(
    messages: list[ChatMessage], where: str, item: InputItem, items: Sequence[InputItem]
) -> None:
    """The call that the client does not approve of, as the model made it."""
    asked = (each for each in items if each.id == item.approval_request_id)
    if (request := next(asked, None)) is None:
        what = f"{where}.approval_request_id is {item.approval_request_id!r:.100}, no request here"
        raise ApiError(400, what, param=f"{where}.approval_request_id")
    messages.append(ChatMessage(role="assistant", tool_calls=[_call(where, request)]))
    text = f"The user refused this call. {item.reason or ''}".strip()
    _add_result(messages, where, request, text)


def _reasoning(where: str, item: InputItem) -> str:
    unsealed = _unsealed(item.encrypted_content)
    texts = _texts(f"{where}.content", item.content or unsealed or item.summary or "")
    return texts if isinstance(texts, str) else "".join(part.get("text", "") for part in texts)


def _given(name: str, value: Any) -> Any:
    if value is None:
        raise ApiError(400, f"{name} is missing", param=name)
    return value


def _texts(name: str, content: str | list[Part]) -> str | list[Part]:
    """The parts as chat completions have them."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.get("type") == "input_image":
            texts.append(part)
            continue
        field = "refusal" if part.get("type") == "refusal" else "text"
        if part.get("type") not in (*_TEXTS, "refusal"):
            raise ApiError(
                400,
                f"{name}[{index}] is of type {part.get('type')!r}, which is not supported; send "
                "parts of type 'input_text'",
                param=f"{name}[{index}]",
            )
        if not isinstance(text := part.get(field), str):
            what = f"{name}[{index}].{field}"
            raise ApiError(400, f"{what} is missing, or no text; give it", param=what)
        texts.append({"type": "text", "text": text})
    return texts


def with_one_system_message(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Instructions that stand at the beginning as one message: templates take no second one, or
    leave it out."""
    num = next(
        (at for at, each in enumerate(messages) if each.role not in ("system", "developer")),
        len(messages),
    )
    if num < 2:
        return [*messages]
    texts = [_joined(each.content or "") for each in messages[:num]]
    return [ChatMessage(role=messages[0].role, content="\n\n".join(texts)), *messages[num:]]


def _joined(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)
