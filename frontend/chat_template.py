"""Conversations to prompt texts, by the Jinja2 template that came with the model. A template is
foreign code: it runs in Jinja2's immutable sandbox and sees plain data only. Imported only where a
template is rendered, because it loads jinja2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from frontend.errors import ChatTemplateError

_CALLER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template's expressions may raise besides Jinja2's own errors."""
# not text that a conversation holds, and with the trailing space that shows whether the template
# trims the end of a message
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    **variables: Any,
) -> str:
    """The prompt text of a conversation.

    The result is that of `apply_chat_template` of transformers 5, with one addition: a template
    that takes texts only gets a list of text parts joined with newlines, not the list's `repr`.

    Args:
        messages: `{"role": ..., "content": ...}` mappings, oldest first.
        add_generation_prompt: end with the header that makes the model answer.
        continue_final_message: leave the last message open so that the model continues it.
        tools: JSON schemas of functions that the template may offer to the model.
        special_tokens: variables such as bos_token.
        variables: whatever else the template reads.

    Raises:
        ChatTemplateError: wrong messages or tools, variables or tools that the template does not
            read, or a template that fails or breaks out.
    """
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "continue_final_message and add_generation_prompt contradict each other; pass "
            "add_generation_prompt=False to continue the final message"
        )
    compiled = _compile(template)
    _refuse_unread(template, {**variables, "tools": tools} if tools else variables)
    chat = _checked_messages(messages)
    if not _takes_parts(template):
        chat = [_with_joined_parts(index, message) for index, message in enumerate(chat)]
    final_text = _mark_final_message(chat) if continue_final_message else ""
    rendered = _render(
        compiled,
        messages=chat,
        tools=_checked_tools(tools),
        add_generation_prompt=add_generation_prompt,
        **{"documents": None, **(special_tokens or {}), **_plain(variables)},
    )
    return _cut_at_mark(rendered, final_text) if continue_final_message else rendered


def _refuse_unread(template: str, variables: Mapping[str, Any]) -> None:
    """What the template does not read would be dropped without a word."""
    unread = sorted(variables.keys() - _variables_of(template))
    if unread:
        raise ChatTemplateError(
            f"the chat template does not use {', '.join(unread)}: the model would not see it; omit "
            "it, or pass a template that uses it as chat_template"
        )


def _checked_messages(messages: object) -> list[dict[str, Any]]:
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
        case list():
            return [_plain(item) for item in value]
        case tuple():
            return tuple(_plain(item) for item in value)
        case _:
            return f"<{type(value).__name__}>"


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    """The template in a sandbox with the names that transformers 5 gives it: `raise_exception`,
    `strftime_now`, `tojson` without HTML escapes, loop controls, `{% generation %}` blocks, and
    safe replacements of `dict` and `namespace`."""
    if not isinstance(template, str):
        raise _wrong_type("chat_template", template, "Jinja2 source")
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template does not parse, line {error.lineno}: {error.message}; "
            "pass another one as chat_template"
        ) from error


@lru_cache(maxsize=32)
def _variables_of(template: str) -> set[str]:
    """Names that the template reads and does not set itself."""
    return jinja2.meta.find_undeclared_variables(_environment().parse(template))


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _render(compiled: jinja2.Template, **variables: Any) -> str:
    try:
        return compiled.render(**variables)
    except SecurityError as error:
        raise ChatTemplateError(
            f"the chat template tried something that templates may not do: {error}; "
            "do not trust this template, pass another one as chat_template"
        ) from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template refuses this conversation: {error}") from error
    # what a template's code raises on messages that it did not expect
    except _CALLER_ERRORS as error:
        raise ChatTemplateError(
            f"the chat template failed ({type(error).__name__}: {error}); check the messages' "
            "fields, or pass another template as chat_template"
        ) from error


@lru_cache(maxsize=32)
def _takes_parts(template: str) -> bool:
    """Whether the template handles content that is a list of parts: it prints the text of a part
    and not the part itself."""
    probe = [{"role": "user", "content": [{"type": "text", "text": "PROBE-OF-PARTS"}]}]
    try:
        rendered = _render(_compile(template), messages=probe, add_generation_prompt=False)
    except ChatTemplateError:
        return False
    return "PROBE-OF-PARTS" in rendered and "PROBE-OF-PARTS'" not in rendered


def _with_joined_parts(index: int, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(
                f"message {index} has a part of type {kind!r}, this model's chat template takes "
                "text only; send parts of type 'text'"
            )
    return {**message, "content": "\n".join(texts)}


def _mark_final_message(chat: list[dict[str, Any]]) -> str:
    """Puts the mark behind the last message's text; returns that text."""
    final = chat[-1]
    content = final.get("content")
    if isinstance(content, str):
        chat[-1] = {**final, "content": content + _CONTINUE_MARK}
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_MARK
            return text
    raise ChatTemplateError(
        "continue_final_message is set, but the final message has no text to continue"
    )


def _cut_at_mark(rendered: str, final_text: str) -> str:
    mark = _CONTINUE_MARK.strip()
    if mark not in rendered or final_text.strip() not in rendered:
        raise ChatTemplateError(
            "continue_final_message is set, but the chat template leaves out or changes the final "
            "message; check its role and content"
        )
    start = rendered.rindex(mark)
    kept = rendered[:start]
    # a template that trims messages trimmed the mark's space, and would have trimmed the text's
    return kept if rendered.startswith(_CONTINUE_MARK, start) else kept.rstrip()


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it
    renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_rendered")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _rendered(self, caller: Any) -> str:
        return str(caller())


class _TemplateDict:
    """`dict` for templates, without the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace` for templates; underscored names, the way to CPython's inside, are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # self is taken from args so that `namespace(self=...)` works, as in Jinja2's own
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the namespace attribute {name!r} begins with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
