"""Conversations to prompt texts, by the Jinja2 template that came with the model. A template is
foreign code: it runs in a process of its own, within limits, on plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from frontend.errors import ChatTemplateError
from frontend.text.template_process import TemplateRenderers

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
own_renderers = TemplateRenderers(
    3, "shorten the conversation, or pass another template as chat_template"
)
"""Of models' own templates, which do not wait for those that requests bring."""
request_renderers = TemplateRenderers(
    2, "do not trust this template, pass another one as chat_template", niceness=5
)


def close_renderers() -> None:
    """End the processes that are not at work."""
    own_renderers.close()
    request_renderers.close()


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    renderers: TemplateRenderers = request_renderers,
    **variables: Any,
) -> str:
    """The prompt text of a conversation.

    The result is that of `apply_chat_template` of transformers 5, with one addition: a template
    that takes texts only gets a list of text parts joined with newlines, not the list's `repr`.
    Raises ChatTemplateError: wrong messages or tools, variables or tools that the template does not
    read, or a template that fails, breaks out, or passes a limit of `template_process.py`.

    Args:
        messages: `{"role": ..., "content": ...}` mappings, oldest first.
        add_generation_prompt: end with the header that makes the model answer.
        continue_final_message: leave the last message open so that the model continues it.
        tools: JSON schemas of functions that the template may offer to the model.
        special_tokens: variables such as bos_token.
        renderers: the processes that do it.
        variables: whatever else the template reads.
    """
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "continue_final_message and add_generation_prompt contradict each other; pass "
            "add_generation_prompt=False to continue the final message"
        )
    if not isinstance(template, str):
        raise _wrong_type("chat_template", template, "Jinja2 source")
    try:
        request = {
            "template": template,
            "messages": checked_messages(messages),
            "add_generation_prompt": bool(add_generation_prompt),
            "continue_final_message": bool(continue_final_message),
            "tools": _checked_tools(tools),
            "special_tokens": _plain(special_tokens or {}),
            "variables": _plain(variables),
        }
        return renderers.render(request)
    except TypeError:
        raise ChatTemplateError(
            "messages, tools or variables have keys that are no texts; send plain data as in JSON"
        ) from None
    except RecursionError:
        raise ChatTemplateError(
            "messages, tools or variables nest too deeply; send plain data of fewer levels"
        ) from None


def checked_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        expected = "a list such as [{'role': 'user', 'content': 'Hello'}]"
        raise _wrong_type("messages", messages, expected)
    if not messages:
        raise ChatTemplateError("messages is empty; give at least one message")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong_type(f"message {index}", message, "a mapping with 'role' and 'content'")
    # templates handle a missing key, and print None; OpenAI's clients send None
    plain = {_plain(key): _plain(value) for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(
            f"message {index} has role {role!r}, it must be a text such as 'system', 'user' or "
            "'assistant'"
        )
    content = plain.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        expected = "a text or a list of parts such as {'type': 'text', 'text': 'Hello'}"
        raise _wrong_type(f"the content of message {index}", content, expected)
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _checked_tools(tools: object) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise _wrong_type("tools", tools, "a list of schemas")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            expected = "a JSON schema such as {'type': 'function', 'function': {...}}"
            raise _wrong_type(f"tool {index}", tool, expected)
    return [_plain(tool) for tool in tools]


def _wrong_type(name: str, value: object, expected: str) -> ChatTemplateError:
    return ChatTemplateError(f"{name} is {type(value).__name__}, it must be {expected}")


def _plain(value: Any) -> Any:
    """Rebuilt of plain JSON types, so that a template reaches no methods of the caller's objects;
    anything else is a placeholder that names its type."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return f"<{type(value).__name__}>"
