"""Renders chat templates for `template_process.py`: a program that reads conversations from its
standard input. A template is foreign code: it runs in Jinja2's immutable sandbox, and, as that
bounds neither time nor memory, in this process, which the system ends at its limits."""

import json
from collections.abc import Mapping
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
from frontend.text.template_process import MAX_PROMPT_CHARS
from protocol.sandbox import serve_sandbox

# not text that a conversation holds, and with the trailing space that shows whether the template
# trims the end of a message
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def main() -> None:
    """Serve until the input ends."""
    serve_sandbox(lambda _setup: _answer, refusal=ChatTemplateError)


def _answer(request: bytes) -> bytes:
    return render(**json.loads(request)).encode("utf-8", "surrogatepass")


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[Any] | None,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
) -> str:
    """As `render_chat`, of checked and plain arguments, without the limits on time and memory.

    Raises:
        ChatTemplateError: see `render_chat`.
        MemoryError: of the template.
    """
    compiled = _compile(template)
    _refuse_unread(template, {**variables, "tools": tools} if tools else variables)
    chat = messages
    if not _takes_parts(template):
        chat = [_with_joined_parts(index, message) for index, message in enumerate(chat)]
    final_text = _mark_final_message(chat) if continue_final_message else ""
    rendered = _render(
        compiled,
        messages=chat,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        **{"documents": None, **special_tokens, **variables},
    )
    if len(rendered) > MAX_PROMPT_CHARS:
        raise ChatTemplateError(
            f"the chat template made a prompt of {len(rendered)} characters, the limit is "
            f"{MAX_PROMPT_CHARS}; shorten the conversation, or pass another template as "
            "chat_template"
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


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    """The template in a sandbox with the names that transformers 5 gives it: `raise_exception`,
    `strftime_now`, `tojson` without HTML escapes, loop controls, `{% generation %}` blocks, and
    safe replacements of `dict` and `namespace`."""
    try:
        return _environment().from_string(template)
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template does not parse, line {error.lineno}: {error.message}; "
            "pass another one as chat_template"
        ) from error
    except Exception as error:  # of Python's compiler: nested too deeply, and the like
        raise ChatTemplateError(
            f"the chat template does not compile ({type(error).__name__}: {error}); pass another "
            "one as chat_template"
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
    except MemoryError:
        raise
    except Exception as error:  # a template's code raises whatever Python can
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
        elif isinstance(part, dict) and isinstance(part.get("placeholder"), str):
            texts.append(part["placeholder"])  # of an image or a sound
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind == "text":
                raise ChatTemplateError(
                    f"message {index} has a part of type 'text' without a text; write it as "
                    "{'type': 'text', 'text': ...}"
                )
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


if __name__ == "__main__":
    main()
