"""An answer's text in its parts: reasoning, content, tool calls. How it is parsed is known by the
model's chat template, unless the server was told."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.harmony import HarmonyStream
from frontend.http.reasoning import ReasoningStream
from frontend.http.settings import ServerSettings
from frontend.http.tools.calls import ArgumentsDelta, ToolCall
from frontend.http.tools.grammar import calls_grammar
from frontend.http.tools.harmony_grammar import final_answer
from frontend.http.tools.rules import OfferedTool
from frontend.http.tools.stream import FORMATS, Schemas, ToolCallStream, format_of_template
from frontend.reasoning_formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_format_of_template,
)
from frontend.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


_MAX_TOOLS = 1024
Part = Reasoning | str | ToolCall | ArgumentsDelta
"""Content is a string."""


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are parsed."""

    tool_calls: str | None = None
    """A name in `FORMATS`; None: calls are text."""
    schemas: Schemas = field(default_factory=dict)
    """JSON schemas of the arguments, by the names of tools."""
    reasoning: ReasoningFormat | None = None
    has_one_call: bool = False
    """Calls after the first are left out."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the whole text must have."""
    tools_in_prompt: bool = True
    """False: the template has no place for them, and the model is led to them."""

    @property
    def is_plain(self) -> bool:
        return self.tool_calls is None and self.reasoning is None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether markers would be missing from texts that leave special tokens out."""
        calls = self.tool_calls is not None and FORMATS[self.tool_calls]({}).shows_special_tokens
        return calls or (self.reasoning is not None and self.reasoning.shows_special_tokens)

    def parser(self, prompt: str | None, *, streams_arguments: bool = False) -> "AnswerParser":
        """A parser for one choice of an answer to `prompt`."""
        calls = None
        if self.tool_calls is not None:
            found = FORMATS[self.tool_calls](self.schemas)
            calls = ToolCallStream(found, streams_arguments=streams_arguments)
        reasoning: ReasoningStream | HarmonyStream | None = None
        if self.reasoning is not None and self.reasoning.is_harmony:
            reasoning = HarmonyStream(self.schemas)
        elif self.reasoning is not None:
            is_open = self.reasoning.opens_in(prompt or "")
            inside = None if calls is None or not found.is_marked else found
            reasoning = ReasoningStream(self.reasoning, is_open=is_open, calls=inside)
        return AnswerParser(reasoning, calls, has_one_call=self.has_one_call)


def thinking_variables(llm: AsyncLLM, *, thinks: bool, has_tools: bool) -> dict[str, Any]:
    """Of the chat template: the one that turns reasoning on or off, if it has one."""
    template = llm.get_tokenizer().used_template(None, has_tools=has_tools) or ""
    return {"enable_thinking": thinks} if "enable_thinking" in template else {}


def answer_format(
    request: Request,
    llm: AsyncLLM,
    chat_template: str | None,
    *,
    tools: Sequence[OfferedTool] = (),
    must_call: bool = False,
    has_one_call: bool = False,
    constrained: StructuredOutputsParams | None = None,
) -> AnswerFormat:
    """
    Args:
        chat_template: of the request, or the name of one of the model's; None: the model's own.
        tools: calls of these are looked for.
        must_call: the answer is nothing else.
        has_one_call: at most one is wanted.
        constrained: what it must be if it calls nothing.

    Raises:
        ApiError: this model takes no tools, or it is not known how it writes calls.
        InvalidInput: the model has no tokenizer.
    """
    if len(tools) > _MAX_TOOLS:
        what = f"there are {len(tools)} tools, the limit is {_MAX_TOOLS}; offer fewer"
        raise ApiError(400, what, param="tools")
    settings: ServerSettings = request.app.state.settings
    used = llm.get_tokenizer().used_template(chat_template or None, has_tools=bool(tools))
    template = used or ""
    if settings.reasoning_parser is None:
        reasoning = reasoning_format_of_template(template)
    else:
        reasoning = REASONING_FORMATS[settings.reasoning_parser]
    calls = None
    if tools and not must_call and "tools" not in template:
        raise ApiError(
            400,
            "tools: the chat template does not use tools, the model would not see them; omit them, "
            "or use a template that takes tools",
            param="tools",
        )
    must_be = constrained
    if settings.enable_in_reasoning and (constrained is not None or must_call):
        reasoning = None  # it is no part of the grammar
    is_harmony = reasoning is not None and reasoning is REASONING_FORMATS["openai_gptoss"]
    if tools:
        calls = settings.tool_call_parser or format_of_template(template)
        if "tools" not in template:
            # the model knows no form, nor when to end: the grammar leads it
            calls, has_one_call = "hermes", True
        if calls is None:
            raise ApiError(
                400,
                "tools: how this model writes calls is not known from its chat template; start the "
                f"server with --tool-call-parser, one of {', '.join(FORMATS)}, or omit tools",
                param="tools",
            )
        grammar = calls_grammar(
            calls,
            tools,
            llm.get_tokenizer(),
            must_call=must_call,
            has_one_call=has_one_call,
            template=template,
            answer=None if constrained is None else schema_of(constrained),
            answer_field="" if constrained is None else constrained.to_wire().name,
            may_think=is_harmony,
        )
        if grammar is not None:
            must_be = StructuredOutputsParams(grammar=grammar, field="tools")
    elif constrained is not None and is_harmony:
        must_be = final_answer(constrained, llm.get_tokenizer()) or constrained
    has_messages = is_harmony and must_be is not constrained and calls in (None, "openai")
    if must_be is not None and not has_messages:
        must_be = replace(must_be, reasoning=reasoning)
    schemas = {tool.name: tool.parameters for tool in tools}
    return AnswerFormat(calls, schemas, reasoning, has_one_call, must_be, "tools" in template)


def schema_of(constrained: StructuredOutputsParams) -> dict[str, Any]:
    """
    Raises:
        ApiError: it has none, so it does not go together with tools.
    """
    if constrained.json_object:
        return {"type": "object"}
    if not isinstance(constrained.json, dict):
        raise ApiError(
            400, "tools go together with a JSON schema as an object alone; omit one", param="tools"
        )
    return constrained.json


class AnswerParser:
    """One choice, in pieces. The parts do not depend on the pieces, when texts are joined."""

    def __init__(
        self,
        reasoning: ReasoningStream | HarmonyStream | None,
        calls: ToolCallStream | None,
        *,
        has_one_call: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._has_one_call = has_one_call
        self._is_left_out = False
        """The last call, with its arguments."""
        self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def feed(self, text: str, *, at_end: bool) -> list[Part]:
        """The parts that are certain by now: with `at_end` all of them."""
        parts: list[Part] = []
        content = text
        if self._reasoning is not None:
            reasoning, content = self._reasoning.feed(text)
            if at_end:
                last_reasoning, last_content = self._reasoning.close()
                reasoning, content = reasoning + last_reasoning, content + last_content
            if reasoning:
                parts.append(Reasoning(reasoning))
        if self._calls is None:
            return [*parts, content] if content else parts
        found = self._calls.feed(content)
        if at_end:
            found += self._calls.close()
        for part in found:
            if isinstance(part, ToolCall):
                self._is_left_out = self._has_one_call and self.num_calls > 0
                self.num_calls += not self._is_left_out
            if isinstance(part, str) or not self._is_left_out:
                parts.append(part)
        return parts
