"""A chat as every API asks for it: checked, its format of answers chosen, and generated."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request

from frontend.async_llm import AsyncLLM
from frontend.http.answer_parts import AnswerFormat, answer_format
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.exchange import Exchange
from frontend.http.generation.conversation import (
    template_messages,
    template_tools,
    template_variables,
)
from frontend.http.generation.parameters import sampling_params
from frontend.http.generation.requests import ChatCompletionRequest, Tool
from frontend.http.generation.structured_outputs import structured_outputs
from frontend.http.tools.grammar import chosen_tool
from frontend.http.tools.rules import OfferedTool
from frontend.outputs import RequestOutput
from frontend.sampling_params import SamplingParams

_TOOL_FIELD = "tools[{}].function.parameters"


def check_chat(asked: ChatCompletionRequest) -> None:
    """
    Raises:
        ApiError: what this server does not do.
    """
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if asked.tool_choice not in (None, "none", "auto") and not asked.tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")


def chat_format(
    request: Request,
    llm: AsyncLLM,
    asked: ChatCompletionRequest,
    *,
    tool_field: str | Sequence[str] = _TOOL_FIELD,
    format_field: str | None = None,
) -> AnswerFormat:
    """`tool_field`, `format_field`: what the user calls the schemas, where that is no chat.

    Raises:
        ApiError, InvalidInput: something that cannot be served.
    """
    choice = asked.tool_choice
    tools = [] if choice == "none" else offered_tools(asked.tools, tool_field)
    has_one_call = asked.parallel_tool_calls is False
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        if choice.get("type") != "function" or not isinstance(function, dict):
            raise not_supported("tool_choice", choice, '"none", "auto", "required" or a function')
        tools, has_one_call = chosen_tool(tools, str(function.get("name"))), True
    constrained = structured_outputs(asked)
    if constrained is not None and format_field is not None:
        constrained = dataclasses.replace(constrained, field=format_field)
    return answer_format(
        request,
        llm,
        asked.chat_template,
        tools=tools,
        must_call=choice == "required" or isinstance(choice, dict),
        has_one_call=has_one_call,
        constrained=constrained,
    )


def offered_tools(
    tools: Sequence[Tool] | None, field: str | Sequence[str] = _TOOL_FIELD
) -> list[OfferedTool]:
    """
    Args:
        field: what the user calls the schema of the tool with a number; or of each.
    """
    return [
        OfferedTool(
            tool.function.name,
            tool.function.parameters,
            tool.function.strict is True,
            field=field.format(number) if isinstance(field, str) else field[number],
        )
        for number, tool in enumerate(tools or ())
    ]


async def generate_chat(
    llm: AsyncLLM, asked: ChatCompletionRequest, parts: AnswerFormat, exchange: Exchange
) -> AsyncGenerator[RequestOutput, None]:
    """
    Raises:
        ApiError, InvalidInput: something that cannot be served.
    """
    messages, params, options = await chat_call(llm, asked, parts)
    return llm.chat(
        messages,
        params,
        **options,
        cache_salt=asked.cache_salt,
        **exchange.generates_as(
            asked.user or asked.safety_identifier,
            asked.priority,
            asked.prompt_cache_key or asked.session_id,
        ),
    )


async def chat_call(
    llm: AsyncLLM, asked: ChatCompletionRequest, parts: AnswerFormat
) -> tuple[list[dict[str, Any]], SamplingParams, dict[str, Any]]:
    """Messages, parameters and options of the template, as `AsyncLLM.chat` takes them.
    Raises ApiError, InvalidInput: something that cannot be served."""
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    max_tokens = max_tokens or llm.preset_sampling.get("max_tokens")
    num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    params = sampling_params(
        llm,
        asked,
        max_tokens=max_tokens,
        logprobs=num_logprobs,
        constrained=parts.structured_outputs,
    )
    if parts.shows_special_tokens and asked.skip_special_tokens is None:
        params = dataclasses.replace(params, skip_special_tokens=False)
    continues = bool(asked.continue_final_message)
    tools = None
    if parts.tools_in_prompt and asked.tool_choice != "none":
        tools = template_tools(asked.tools)
    tokenizer = llm.get_tokenizer()
    template = tokenizer.used_template(asked.chat_template or None, has_tools=bool(tools)) or ""
    variables = template_variables(asked.chat_template_kwargs)
    for name in ("reasoning_effort", "documents"):
        if (value := getattr(asked, name)) is not None:
            if name not in template:
                raise not_supported(name, value, "the chat template does not use it; omit it")
            variables[name] = value
    options = {
        "chat_template": asked.chat_template,
        "add_generation_prompt": asked.add_generation_prompt is not False and not continues,
        "continue_final_message": continues,
        "tools": tools,
        "chat_template_kwargs": variables,
    }
    return await template_messages(asked.messages, template), params, options
