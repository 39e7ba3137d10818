"""What waits for a client whose queue is full. Outputs of one sequence become one output: it grows
by tokens, not by steps."""

import dataclasses
from array import array
from collections.abc import Sequence

import msgspec

from engine_core.server.transport import Frame
from protocol.base import Message
from protocol.codec import encode
from protocol.outputs import EngineCoreOutput, EngineCoreOutputs, Heartbeat, Logprobs

_ENTRY_BYTES = 512
"""Bytes of an object here, beside what it holds."""
_SequenceKey = tuple[str, int]
"""Request id and index."""


class Backlog:
    """Messages for one client, in order, oldest first.
    `num_bytes`: about how much memory they take."""

    def __init__(self) -> None:
        self._waiting: list[_MergedOutputs | list[Frame]] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Heartbeats need not wait."""
        if isinstance(message, Heartbeat):
            return
        if not isinstance(message, EngineCoreOutputs):
            encoded = [encode(message), *frames]
            self._waiting.append(encoded)
            self.num_bytes += _num_bytes(encoded)
            return
        last = self._waiting[-1] if self._waiting else None
        if not isinstance(last, _MergedOutputs) or not last.may_take(message):
            last = _MergedOutputs()
            self._waiting.append(last)
        before = last.num_bytes
        last.add(message)
        self.num_bytes += last.num_bytes - before

    def first(self) -> list[Frame]:
        """The frames of the oldest message."""
        oldest = self._waiting[0]
        return [encode(oldest.merged())] if isinstance(oldest, _MergedOutputs) else oldest

    def pop_first(self) -> None:
        """It was sent."""
        oldest = self._waiting.pop(0)
        self.num_bytes -= (
            oldest.num_bytes if isinstance(oldest, _MergedOutputs) else _num_bytes(oldest)
        )


def _num_bytes(frames: list[Frame]) -> int:
    return _ENTRY_BYTES + sum(map(len, frames))


@dataclasses.dataclass(slots=True)
class _SequenceOutputs:
    token_ids: "array[int]" = dataclasses.field(default_factory=lambda: array("i"))
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    num_cached_tokens: int | None = None
    last: EngineCoreOutput | None = None
    """The last one that was an object of its own."""


class _MergedOutputs:
    """Outputs of several steps."""

    def __init__(self) -> None:
        self._sequences: dict[_SequenceKey, _SequenceOutputs] = {}
        self._finished: dict[str, None] = {}
        self._last: EngineCoreOutputs | None = None
        self.num_bytes = 0

    def may_take(self, outputs: EngineCoreOutputs) -> bool:
        """Not tokens of other weights, nor an id that is used again, for another request."""
        if self._last is not None and self._last.weights_version != outputs.weights_version:
            return False
        if not self._finished:
            return True
        ids = [output.request_id for output in outputs.other_outputs]
        if outputs.decoded is not None:
            ids += outputs.decoded.request_ids
        return self._finished.keys().isdisjoint(ids)

    def add(self, outputs: EngineCoreOutputs) -> None:
        before = len(self._sequences) + len(self._finished)
        self._last = outputs
        if outputs.decoded is not None:
            columns = outputs.decoded
            indexes = columns.indexes or [0] * len(columns.request_ids)
            tokens = memoryview(columns.token_ids).cast("i")
            for key, token in zip(
                zip(columns.request_ids, indexes, strict=True), tokens, strict=True
            ):
                self._sequence(key).token_ids.append(token)
            self.num_bytes += tokens.nbytes
        for output in outputs.other_outputs:
            sequence = self._sequence((output.request_id, output.index))
            sequence.token_ids.extend(output.new_token_ids)
            sequence.last = output
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = output.num_cached_tokens
            for report, parts in (
                (output.logprobs, sequence.logprobs),
                (output.prompt_logprobs, sequence.prompt_logprobs),
            ):
                if report is not None:
                    parts.append(report)
                    self.num_bytes += _ENTRY_BYTES + len(report.token_ids) * 2
            if output.pooled is not None:
                self.num_bytes += len(output.pooled.data)
            self.num_bytes += sequence.token_ids.itemsize * len(output.new_token_ids)
        self._finished.update(dict.fromkeys(outputs.finished_req_ids))
        self.num_bytes += _ENTRY_BYTES * (len(self._sequences) + len(self._finished) - before)

    def _sequence(self, key: _SequenceKey) -> _SequenceOutputs:
        found = self._sequences.get(key)
        if found is None:
            found = self._sequences[key] = _SequenceOutputs()
        return found

    def merged(self) -> EngineCoreOutputs:
        assert self._last is not None
        return msgspec.structs.replace(
            self._last,
            other_outputs=[_merged(key, each) for key, each in self._sequences.items()],
            finished_req_ids=list(self._finished),
            decoded=None,
        )


def _merged(key: _SequenceKey, outputs: _SequenceOutputs) -> EngineCoreOutput:
    last = outputs.last or EngineCoreOutput(request_id=key[0], new_token_ids=[], index=key[1])
    return msgspec.structs.replace(
        last,
        new_token_ids=outputs.token_ids.tolist(),
        num_cached_tokens=outputs.num_cached_tokens,
        logprobs=Logprobs.joined(outputs.logprobs),
        prompt_logprobs=Logprobs.joined(outputs.prompt_logprobs),
    )
