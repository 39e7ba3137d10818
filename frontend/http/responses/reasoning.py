"""`reasoning` of a request, as a chat template reads it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.http.generation.requests import ChatMessage
from frontend.http.responses.bodies import ReasoningOptions, ResponsesRequest

_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""The nearest of the levels that every template with levels knows."""


def reasoning_of(
    llm: AsyncLLM, asked: ResponsesRequest, *, has_tools: bool
) -> tuple[ReasoningOptions, str | None, dict[str, Any]]:
    """What is done of it, the level that the template gets, and the template's variables. Where
    the template reads no level, effort is of no effect, but for `none` where it can think or not.
    """
    options = asked.reasoning or ReasoningOptions()
    variables = dict(asked.chat_template_kwargs or {})
    if options.effort is None:
        return options, None, variables
    template = llm.get_tokenizer().used_template(None, has_tools=has_tools) or ""
    level = None
    if "reasoning_effort" in template:
        names = (f"'{options.effort}'", f'"{options.effort}"')
        is_known = any(name in template for name in names)
        level = options.effort if is_known else _NEAREST.get(options.effort, options.effort)
    if "enable_thinking" in template:
        variables.setdefault("enable_thinking", options.effort != "none")
    elif level is None:
        options = msgspec.structs.replace(options, effort=None)
    return options, level, variables


def without_old_reasoning(messages: Sequence[ChatMessage]) -> None:
    """Leaves out what was thought before the last turn."""
    last = max((at for at, each in enumerate(messages) if each.role == "user"), default=0)
    for message in messages[:last]:
        message.reasoning = None
