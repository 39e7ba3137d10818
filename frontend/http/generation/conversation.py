"""Messages as OpenAI's clients send them to messages as chat templates read them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from frontend.http.api_errors import ApiError
from frontend.http.generation.requests import AssistantToolCall, ChatMessage, Tool
from frontend.multimodal.media import in_thread

_NO_VARIABLES = frozenset(
    ("self", "template", "compiled", "messages", "tools", "chat_template", "special_tokens")
) | {"add_generation_prompt", "continue_final_message", "renderers", "is_cut"}
"""Names that mean something else on their way to the template."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's messages."""
_NOTES = ("annotations", "provider_specific_fields")
"""Fields of an answer that are for its reader, not for a model."""
_MANY = 1000


async def template_messages(
    messages: Sequence[ChatMessage], chat_template: str
) -> list[dict[str, Any]]:
    """See `_template_messages`; many of them in a thread."""
    make = functools.partial(_template_messages, messages, chat_template)
    return make() if len(messages) < _MANY else await in_thread(make, decodes=False)


def _template_messages(messages: Sequence[ChatMessage], chat_template: str) -> list[dict[str, Any]]:
    """Arguments of calls are objects, as templates take them; "developer" is "system" where the
    template does not know that role, which it would leave out.

    Raises:
        ApiError: arguments that are no JSON object; a role that there is not.
    """
    found = []
    for index, message in enumerate(messages):
        check_role(message.role, f"messages[{index}].role", chat_template)
        plain = msgspec.to_builtins(message)
        for name in _NOTES:
            plain.pop(name, None)
        plain.setdefault("content", "")
        if message.role == "developer" and "developer" not in chat_template:
            plain["role"] = "system"
        if message.tool_calls is not None:
            plain["tool_calls"] = [
                _template_call(call, f"messages[{index}].tool_calls[{number}]")
                for number, call in enumerate(message.tool_calls)
            ]
        found.append(plain)
    return found


def check_role(
    role: str, param: str, chat_template: str | None = None, known: Sequence[str] = ROLES
) -> None:
    """Raises ApiError: neither the API nor the template, where one is given, names it."""
    if role in known or any(f"{mark}{role}{mark}" in (chat_template or "") for mark in "'\""):
        return
    others = "" if chat_template is None else ", or one that the model's chat template names"
    raise ApiError(
        400,
        f"{param} is {role!r:.100}, it must be one of {', '.join(known)}{others}",
        param=param,
    )


def _template_call(call: AssistantToolCall, name: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        param = f"{name}.function.arguments"
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"{param} is no JSON object: {error}", param=param) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    Raises:
        ApiError: one of them has a field of its own.
    """
    for name in _NO_VARIABLES.intersection(given or ()):
        param = f"chat_template_kwargs.{name}"
        raise ApiError(400, f"{param} is not a variable that can be set; omit it", param=param)
    return dict(given or {})


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """None if there are none."""
    return [msgspec.to_builtins(tool) for tool in tools] if tools else None
