"""A response as it grows: its items, and OpenAI's events about them in OpenAI's order."""

import secrets
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from frontend.http.answer_parts import Part, Reasoning
from frontend.http.responses import bodies
from frontend.http.tools.calls import ArgumentsDelta, ToolCall

TextKind = Literal["output_text", "reasoning_text"]


class ResponseWriter:
    """
    Args:
        response: gets the items, and in the end its status.
    """

    def __init__(self, response: bodies.ResponseObject) -> None:
        self.response = response
        self._num_events = 0
        self._open: TextKind | ToolCall | None = None
        self._item_id = ""
        self._pieces: list[str] = []

    def begin(self) -> list[bodies.ResponseEvent]:
        return [
            self._event("created", self._snapshot()),
            self._event("in_progress", self._snapshot()),
        ]

    def add(self, part: Part) -> Iterator[bodies.ResponseEvent]:
        match part:
            case str():
                yield from self._add_text("output_text", part)
            case Reasoning(text):
                yield from self._add_text("reasoning_text", text)
            case ToolCall():
                yield from self._close("completed")
                self._open, self._item_id = part, _new_id("fc")
                self._pieces.clear()
                yield self._item_event("output_item.added", self._call_item(part, "in_progress"))
                if part.arguments:
                    yield self._add_arguments(part.arguments)
            case ArgumentsDelta(text):
                yield self._add_arguments(text)

    def end(
        self, finish_reason: str | None, usage: bodies.ResponseUsage
    ) -> Iterator[bodies.ResponseEvent]:
        """
        Args:
            finish_reason: the engine's.
        """
        is_whole = finish_reason == "stop"
        if not self.response.output and self._open is None:
            yield from self._add_text("output_text", "")
        yield from self._close("completed" if is_whole else "incomplete")
        self.response.status = "completed" if is_whole else "incomplete"
        if not is_whole:
            reason = "max_output_tokens" if finish_reason == "length" else str(finish_reason)
            self.response.incomplete_details = bodies.IncompleteDetails(reason)
        self.response.usage = usage
        yield self._event(self.response.status, self._snapshot())

    def fail(self, code: str, message: str) -> bodies.ResponseEvent:
        self.response.status = "failed"
        self.response.error = bodies.ResponseError(code, message)
        return self._event("failed", self._snapshot())

    def _snapshot(self) -> dict[str, Any]:
        return {"response": msgspec.structs.replace(self.response, output=[*self.response.output])}

    def _event(self, kind: str, fields: dict[str, Any]) -> bodies.ResponseEvent:
        event = bodies.ResponseEvent(
            type=f"response.{kind}", sequence_number=self._num_events, **fields
        )
        self._num_events += 1
        return event

    def _item_event(self, kind: str, item: bodies.OutputItem) -> bodies.ResponseEvent:
        return self._event(kind, {"output_index": len(self.response.output), "item": item})

    def _part_event(self, kind: str, **fields: Any) -> bodies.ResponseEvent:
        return self._event(kind, {**self._place(), "content_index": 0, **fields})

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self.response.output)}

    def _text_item(
        self, kind: TextKind, status: bodies.ItemStatus, *, is_empty: bool
    ) -> bodies.OutputItem:
        text = "".join(self._pieces)
        if kind == "output_text":
            content = [] if is_empty else [bodies.OutputText(text=text)]
            return bodies.MessageItem(id=self._item_id, status=status, content=content)
        reasoning = [] if is_empty else [bodies.ReasoningText(text=text)]
        return bodies.ReasoningItem(id=self._item_id, status=status, content=reasoning)

    def _add_text(self, kind: TextKind, text: str) -> Iterator[bodies.ResponseEvent]:
        if self._open != kind:
            yield from self._close("completed")
            self._open = kind
            self._item_id = _new_id("msg" if kind == "output_text" else "rs")
            self._pieces.clear()
            item = self._text_item(kind, "in_progress", is_empty=True)
            yield self._item_event("output_item.added", item)
            yield self._part_event("content_part.added", part=_text_part(kind, ""))
        if text:
            self._pieces.append(text)
            yield self._part_event(f"{kind}.delta", delta=text, logprobs=_no_logprobs(kind))

    def _close(self, status: bodies.ItemStatus) -> Iterator[bodies.ResponseEvent]:
        kind, self._open = self._open, None
        if kind is None:
            return
        text = "".join(self._pieces)
        item: bodies.OutputItem
        if isinstance(kind, ToolCall):
            done = {**self._place(), "name": kind.name, "arguments": text}
            yield self._event("function_call_arguments.done", done)
            item = self._call_item(kind, status)
        else:
            yield self._part_event(f"{kind}.done", text=text, logprobs=_no_logprobs(kind))
            yield self._part_event("content_part.done", part=_text_part(kind, text))
            item = self._text_item(kind, status, is_empty=False)
        yield self._item_event("output_item.done", item)
        self.response.output.append(item)

    def _add_arguments(self, text: str) -> bodies.ResponseEvent:
        self._pieces.append(text)
        return self._event("function_call_arguments.delta", {**self._place(), "delta": text})

    def _call_item(self, call: ToolCall, status: bodies.ItemStatus) -> bodies.FunctionCallItem:
        text = "".join(self._pieces)
        return bodies.FunctionCallItem(
            id=self._item_id, status=status, call_id=call.id, name=call.name, arguments=text
        )


def _text_part(kind: TextKind, text: str) -> bodies.OutputText | bodies.ReasoningText:
    return (
        bodies.OutputText(text=text) if kind == "output_text" else bodies.ReasoningText(text=text)
    )


def _no_logprobs(kind: TextKind) -> Any:
    return [] if kind == "output_text" else UNSET


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
