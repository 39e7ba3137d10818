"""A response as it grows: its items, and OpenAI's events about them in OpenAI's order."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import msgspec

from frontend.http.answer_parts import Part, Reasoning
from frontend.http.responses import bodies
from frontend.http.responses.call_forms import CallForm, InputText
from frontend.http.responses.input_items import sealed
from frontend.http.tools.calls import ArgumentsDelta, ToolCall

TextKind = Literal["output_text", "reasoning_text", "reasoning_summary_text"]
_PARTS = dict.fromkeys(get_args(TextKind), "content_part")
_PARTS["reasoning_summary_text"] = "reasoning_summary_part"
_INDEXES = {kind: f"{part.split('_')[-2]}_index" for kind, part in _PARTS.items()}


class ResponseWriter:
    """
    Args:
        response: gets the items, and in the end its status.
        forms: of calls, by the names of functions.
        first_number: of its items, which their ids say.
        seals_reasoning: reasoning gets `encrypted_content`.
    """

    def __init__(
        self,
        response: bodies.ResponseObject,
        forms: Mapping[str, CallForm],
        *,
        first_number: int = 0,
        seals_reasoning: bool = False,
    ) -> None:
        self.response = response
        self._forms = forms
        self._first_number = first_number
        self._seals_reasoning = seals_reasoning
        asked = response.reasoning
        shows_summary = asked.summary or asked.generate_summary
        self._reasoning: TextKind = "reasoning_summary_text" if shows_summary else "reasoning_text"
        self._num_events = 0
        self._open: TextKind | ToolCall | None = None
        self._form = CallForm("")
        self._input = InputText()
        self._item_id = ""
        self._pieces: list[str] = []
        self._logprobs: list[bodies.Part] = []

    def begin(self) -> Iterator[bodies.ResponseEvent]:
        yield self._event("created", self._snapshot())
        if self.response.status == "queued":
            yield self._event("queued", self._snapshot())
        self.response.status = "in_progress"
        yield self._event("in_progress", self._snapshot())

    def add(
        self, part: Part, logprobs: list[bodies.Part] | None = None
    ) -> Iterator[bodies.ResponseEvent]:
        """
        Args:
            logprobs: of the tokens of a text.
        """
        match part:
            case str():
                yield from self._add_text("output_text", part, logprobs or [])
            case Reasoning(text):
                yield from self._add_text(self._reasoning, text, [])
            case ToolCall():
                yield from self._close("completed")
                self._form = self._forms.get(part.name) or CallForm(part.name)
                self._begin(part, self._form.prefix)
                self._input = InputText()
                if self._form.event is not None:
                    yield self._item_event("output_item.added", self._call(part, "in_progress"))
                if self._form.kind == "mcp":
                    yield self._event("mcp_call.in_progress", self._place())
                yield from self._add_arguments(part.arguments)
            case ArgumentsDelta(text):
                yield from self._add_arguments(text)

    def end(
        self, finish_reason: str | None, usage: bodies.ResponseUsage
    ) -> Iterator[bodies.ResponseEvent]:
        """
        Args:
            finish_reason: the engine's.
        """
        is_whole = finish_reason == "stop"
        if not self.response.output and self._open is None:
            yield from self._add_text("output_text", "", [])
        yield from self._close("completed" if is_whole else "incomplete")
        self.response.status = "completed" if is_whole else "incomplete"
        if is_whole:
            self.response.completed_at = int(time.time())
        else:
            reason = "max_output_tokens" if finish_reason == "length" else str(finish_reason)
            self.response.incomplete_details = bodies.IncompleteDetails(reason)
        self.response.usage = usage
        yield self._event(self.response.status, self._snapshot())

    def close(self) -> Iterator[bodies.ResponseEvent]:
        """The last item is complete, and the answer goes on."""
        yield from self._close("completed")

    def add_whole(self, item: bodies.OutputItem, *kinds: str) -> Iterator[bodies.ResponseEvent]:
        """An item that is complete when it comes, with events between its begin and its end."""
        self._item_id = item.id
        yield self._item_event("output_item.added", item)
        for kind in kinds:
            yield self._event(kind, self._place())
        yield self._item_event("output_item.done", item)
        self.response.output.append(item)

    def end_call(self, index: int, call: bodies.McpCallItem) -> Iterator[bodies.ResponseEvent]:
        """A call, the item of a number, that was run."""
        yield self._event(f"mcp_call.{call.status}", {"item_id": call.id, "output_index": index})
        yield self._event("output_item.done", {"output_index": index, "item": call})

    def next_id(self, prefix: str) -> str:
        """The id of the next item, which says whose it is: see `ResponseStore.item`."""
        number = self._first_number + len(self.response.output)
        return item_id(prefix, self.response.id, number)

    def fail(self, code: str, message: str) -> bodies.ResponseEvent:
        self.response.status = "failed"
        self.response.error = bodies.ResponseError(code, message)
        return self._event("failed", self._snapshot())

    def cancel(self) -> None:
        """It ends with what it has; there is no event of that."""
        for _ in self._close("incomplete"):
            pass
        self.response.status = "cancelled"

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

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self.response.output)}

    def _begin(self, what: TextKind | ToolCall, prefix: str) -> None:
        self._open = what
        self._item_id = self.next_id(prefix)
        self._pieces.clear()
        self._logprobs = []

    def _part_event(self, kind: TextKind, name: str, **fields: Any) -> bodies.ResponseEvent:
        """One about the item's only part."""
        return self._event(name, {**self._place(), _INDEXES[kind]: 0, **fields})

    def _text_item(
        self, kind: TextKind, status: bodies.ItemStatus, *, is_empty: bool
    ) -> bodies.OutputItem:
        text = "".join(self._pieces)
        part: Any = [] if is_empty else [_text_part(kind, text, self._logprobs)]
        if kind == "output_text":
            return bodies.MessageItem(id=self._item_id, status=status, content=part)
        where = "content" if kind == "reasoning_text" else "summary"
        seal = sealed(text) if self._seals_reasoning else None
        return bodies.ReasoningItem(
            id=self._item_id, status=status, encrypted_content=seal, **{where: part}
        )

    def _add_text(
        self, kind: TextKind, text: str, logprobs: list[bodies.Part]
    ) -> Iterator[bodies.ResponseEvent]:
        if self._open != kind:
            yield from self._close("completed")
            self._begin(kind, "msg" if kind == "output_text" else "rs")
            item = self._text_item(kind, "in_progress", is_empty=True)
            yield self._item_event("output_item.added", item)
            yield self._part_event(kind, f"{_PARTS[kind]}.added", part=_text_part(kind, "", []))
        if text:
            self._pieces.append(text)
            self._logprobs += logprobs
            yield self._part_event(kind, f"{kind}.delta", delta=text, **_told(kind, logprobs))

    def _close(self, status: bodies.ItemStatus) -> Iterator[bodies.ResponseEvent]:
        kind, self._open = self._open, None
        if kind is None:
            return
        if isinstance(kind, ToolCall):
            if self._form.kind == "custom":
                yield from self._pass_on(self._input.close())
            item = self._call(kind, status)
            if self._form.event is None:
                yield self._item_event("output_item.added", item)
            else:
                text = "".join(self._pieces)
                told = {"input" if self._form.kind == "custom" else "arguments": text}
                if self._form.kind == "function":
                    told["name"] = kind.name
                yield self._event(f"{self._form.event}.done", {**self._place(), **told})
        else:
            text = "".join(self._pieces)
            yield self._part_event(kind, f"{kind}.done", text=text, **_told(kind, self._logprobs))
            yield self._part_event(
                kind, f"{_PARTS[kind]}.done", part=_text_part(kind, text, self._logprobs)
            )
            item = self._text_item(kind, status, is_empty=False)
        if isinstance(item, bodies.McpCallItem) and status == "completed":
            item.status = "in_progress"  # until it was run: `end_call`
        else:
            yield self._item_event("output_item.done", item)
        self.response.output.append(item)

    def _add_arguments(self, text: str) -> Iterator[bodies.ResponseEvent]:
        yield from self._pass_on(self._input.feed(text) if self._form.kind == "custom" else text)

    def _pass_on(self, text: str) -> Iterator[bodies.ResponseEvent]:
        if not text:
            return
        self._pieces.append(text)
        if self._form.event is not None:
            yield self._event(f"{self._form.event}.delta", {**self._place(), "delta": text})

    def _call(self, call: ToolCall, status: bodies.ItemStatus) -> bodies.OutputItem:
        return self._form.item(self._item_id, status, call.id, "".join(self._pieces))


def item_id(prefix: str, response_id: str, number: int) -> str:
    """The id of an item of a response, by its number in the conversation."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{number:x}"


def _text_part(kind: TextKind, text: str, logprobs: list[bodies.Part]) -> bodies.TextPart:
    match kind:
        case "output_text":
            return bodies.OutputText(text=text, logprobs=[*logprobs])
        case "reasoning_text":
            return bodies.ReasoningText(text=text)
        case "reasoning_summary_text":
            return bodies.SummaryText(text=text)


def _told(kind: TextKind, logprobs: list[bodies.Part]) -> dict[str, Any]:
    return {"logprobs": [*logprobs]} if kind == "output_text" else {}
