"""The blocks of an answer, from its parts: whole, or as events."""

from collections.abc import Iterator
from typing import Any

import msgspec

from frontend.http.answer_parts import Part, Reasoning
from frontend.http.anthropic.responses import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    TextDelta,
    ThinkingDelta,
)
from frontend.http.tools.calls import ToolCall


def whole_blocks(parts: list[Part]) -> list[AnswerBlock]:
    """At least one."""
    blocks: list[AnswerBlock] = []
    for part in parts:
        match part:
            case str():
                blocks.append(AnswerText(text=part))
            case Reasoning(text):
                blocks.append(AnswerThinking(thinking=text))
            case ToolCall():
                arguments = msgspec.json.decode(part.arguments)
                blocks.append(AnswerToolUse(id=part.id, name=part.name, input=arguments))
    return blocks or [AnswerText(text="")]


class BlockEvents:
    """Events of one answer's blocks, as their parts come."""

    def __init__(self) -> None:
        self._open: AnswerBlock | None = None
        self._num_closed = 0

    def feed(self, part: Part) -> Iterator[Any]:
        match part:
            case str():
                yield from self._start(AnswerText(text=""))
                yield self._delta(TextDelta(text=part))
            case Reasoning(text):
                yield from self._start(AnswerThinking(thinking=""))
                yield self._delta(ThinkingDelta(thinking=text))
            case ToolCall():
                yield from self._start(AnswerToolUse(id=part.id, name=part.name, input={}))
                yield self._delta(InputJsonDelta(partial_json=part.arguments))
                yield from self._stop()

    def close(self) -> Iterator[Any]:
        """The end of the last block; an answer has at least one."""
        if self._num_closed == 0 and self._open is None:
            yield from self._start(AnswerText(text=""))
        yield from self._stop()

    def _start(self, block: AnswerBlock) -> Iterator[Any]:
        if type(self._open) is not type(block):
            yield from self._stop()
            self._open = block
            yield ContentBlockStart(index=self._num_closed, content_block=block)

    def _delta(self, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> ContentBlockDelta:
        return ContentBlockDelta(index=self._num_closed, delta=delta)

    def _stop(self) -> Iterator[Any]:
        if self._open is not None:
            yield ContentBlockStop(index=self._num_closed)
            self._open = None
            self._num_closed += 1
