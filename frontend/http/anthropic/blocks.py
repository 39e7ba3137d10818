"""The blocks of an answer, from its parts: whole, or as events."""

from collections.abc import Iterator
from typing import Any

import msgspec

from frontend.http.answer_parts import Part, Reasoning
from frontend.http.anthropic import bodies
from frontend.http.anthropic.signatures import signature_of
from frontend.http.tools.calls import ArgumentsDelta, ToolCall


def whole_blocks(parts: list[Part], *, omits_thinking: bool) -> list[bodies.AnswerBlock]:
    """The answer's parts as blocks, at least one."""
    blocks: list[bodies.AnswerBlock] = []
    for part in parts:
        match part:
            case str():
                blocks.append(bodies.AnswerText(text=part))
            case Reasoning(text):
                signature = signature_of(text if omits_thinking else None)
                shown = "" if omits_thinking else text
                blocks.append(bodies.AnswerThinking(thinking=shown, signature=signature))
            case ToolCall():
                arguments = msgspec.json.decode(part.arguments)
                blocks.append(bodies.AnswerToolUse(id=part.id, name=part.name, input=arguments))
    return blocks or [bodies.AnswerText(text="")]


class BlockEvents:
    """Events of one answer's blocks, as their parts come.

    Args:
        omits_thinking: its text is left to the signature.
    """

    def __init__(self, *, omits_thinking: bool) -> None:
        self._open: bodies.AnswerBlock | None = None
        self._num_closed = 0
        self._omitted: list[str] | None = [] if omits_thinking else None

    def feed(self, part: Part) -> Iterator[Any]:
        match part:
            case str():
                yield from self._start(bodies.AnswerText(text=""))
                yield self._delta(bodies.TextDelta(text=part))
            case Reasoning(text):
                yield from self._start(bodies.AnswerThinking(thinking=""))
                if self._omitted is None:
                    yield self._delta(bodies.ThinkingDelta(thinking=text))
                else:
                    self._omitted.append(text)
            case ToolCall():
                yield from self._stop()
                yield from self._start(bodies.AnswerToolUse(id=part.id, name=part.name, input={}))
                if part.arguments:
                    yield self._delta(bodies.InputJsonDelta(partial_json=part.arguments))
            case ArgumentsDelta(text):
                yield self._delta(bodies.InputJsonDelta(partial_json=text))

    def close(self) -> Iterator[Any]:
        """The end of the last block; an answer has at least one."""
        if self._num_closed == 0 and self._open is None:
            yield from self._start(bodies.AnswerText(text=""))
        yield from self._stop()

    def _start(self, block: bodies.AnswerBlock) -> Iterator[Any]:
        if type(self._open) is not type(block):
            yield from self._stop()
            self._open = block
            yield bodies.ContentBlockStart(index=self._num_closed, content_block=block)

    def _delta(self, delta: bodies.Delta) -> bodies.ContentBlockDelta:
        return bodies.ContentBlockDelta(index=self._num_closed, delta=delta)

    def _stop(self) -> Iterator[Any]:
        if self._open is None:
            return
        if isinstance(self._open, bodies.AnswerThinking):
            signature = signature_of(None if self._omitted is None else "".join(self._omitted))
            yield self._delta(bodies.SignatureDelta(signature=signature))
            self._omitted = None if self._omitted is None else []
        yield bodies.ContentBlockStop(index=self._num_closed)
        self._open = None
        self._num_closed += 1
