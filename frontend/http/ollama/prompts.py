"""The prompts of /api/chat and /api/generate: messages, templates, and how much a model thinks."""

import functools
import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.generation.conversation import check_role, template_tools
from frontend.http.ollama import bodies
from frontend.http.ollama.context import Context
from frontend.inputs.prompts import TokensPrompt
from frontend.presets.llm import PresetLLM
from frontend.text.long_texts import read_texts

_ROLES = ("system", "user", "assistant", "tool")
_SWITCHES = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "thinking_mode": ("disabled", "enabled"),
    "thinking_budget": (0, -1),
}
"""Variables of templates that turn reasoning off and on."""
_EFFORTS = ("reasoning_effort", "thinking_effort")
_OFF = ("none", "no_think")
"""Efforts that are none."""


async def prompt_of(
    llm: AsyncLLM, asked: bodies.ChatRequest | bodies.GenerateRequest, context: Context
) -> TokensPrompt:
    """
    Raises:
        ApiError, InvalidInput: something that cannot be served.
        PromptTooLong: by its characters alone.
    """
    if isinstance(asked, bodies.ChatRequest):
        return await _chat_prompt(llm, asked, context)
    template = asked.template or llm.get_tokenizer().chat_template
    assert asked.prompt is not None
    if asked.suffix:
        (found,) = await llm.tokenized([{"prompt": asked.prompt, "suffix": asked.suffix}])
        return cast("TokensPrompt", found)
    before = asked.context or []
    if asked.images and (before or asked.raw):
        raise ApiError(400, "images go without raw and context; use /api/chat")
    if isinstance(llm, PresetLLM) and asked.system is None and not before:
        asked.system = llm.preset.system
    if asked.raw or (template is None and not asked.system):
        encode = functools.partial(
            llm.input_processor.encode,
            asked.prompt,
            add_special_tokens=not before,
            is_cut=True,
        )
        token_ids = await read_texts(encode, len(asked.prompt))
        return context.cut({"prompt_token_ids": before + token_ids})
    messages = [{"role": "user", "content": _content(asked.prompt, asked.images)}]
    if asked.system:
        messages.insert(0, {"role": "system", "content": asked.system})
    options = {"chat_template": asked.template or None, **_thinking(asked.think, template or "")}
    if before:  # it begins with the messages of a preset
        prompt = await AsyncLLM.chat_prompt(llm, messages, is_cut=True, **options)
    else:
        prompt = await llm.chat_prompt(messages, is_cut=True, **options)
    return context.cut({**prompt, "prompt_token_ids": before + prompt["prompt_token_ids"]})


async def _chat_prompt(llm: AsyncLLM, asked: bodies.ChatRequest, context: Context) -> TokensPrompt:
    tools = template_tools(asked.tools)
    template = llm.get_tokenizer().used_template(None, has_tools=bool(tools)) or ""
    for index, each in enumerate(asked.messages or ()):
        check_role(each.role, f"messages[{index}].role", template, _ROLES)
    messages = [_template_message(each) for each in asked.messages or ()]
    variables = _thinking(asked.think, template)
    make = functools.partial(llm.chat_prompt, is_cut=True, tools=tools, **variables)
    return await context.chat_prompt(make, messages)


def _thinking(think: bool | str | None, template: str) -> dict[str, Any]:
    """Variables of the template that say whether to reason, and how much, if it reads any."""
    if think is None:
        return {}
    found: dict[str, Any] = {
        name: values[bool(think)] for name, values in _SWITCHES.items() if _reads(template, name)
    }
    effort = _effort(think, template)
    return found | {name: effort for name in _EFFORTS if effort and _reads(template, name)}


def _reads(template: str, name: str) -> bool:
    """Whether the template asks for a variable. Its texts may have the words of some: of these a
    condition must be."""
    asks = r"(?<![\w.'\"])" + name + r"\b(?!\s*=[^=])"
    if name not in ("enable_thinking", *_EFFORTS):
        asks = r"\{%-?\s*(el)?if\b([^%]*\b(not|and|or))?\s+\(?" + name + r"\b"
    return bool(re.search(asks, template))


def _effort(think: bool | str, template: str) -> str | None:
    """The nearest level that the template names; None: its own default."""
    known = {word for word in (*_OFF, "low", "medium", "high", "max") if _names(template, word)}
    off = next((word for word in _OFF if word in known), None)
    if isinstance(think, bool):
        return ("high" if think else off) if off else None
    if think in known or (think != "max" and not {"low", "high"} <= known):
        return think
    return "high"


def _names(template: str, word: str) -> bool:
    return f"'{word}'" in template or f'"{word}"' in template


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Images stand before the text."""
    if not images:
        return text
    urls = [{"url": f"data:image;base64,{image}"} for image in images]
    parts = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def _template_message(message: bodies.ConversationMessage) -> dict[str, Any]:
    """The message with the names that templates know."""
    calls = [
        {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
        for call in message.tool_calls or ()
    ]
    optional = {
        "reasoning_content": message.thinking,
        "tool_calls": calls,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
    given = {name: value for name, value in optional.items() if value}
    return {
        "role": message.role,
        "content": _content(message.content or "", message.images),
        **given,
    }
