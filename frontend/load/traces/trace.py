"""Traces: requests in order of arrival, as lengths and contents, and the files that hold them."""

import csv
import dataclasses
import datetime
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, TextIO

import msgspec

from frontend.load.traces import TraceError

# Contents are runs of one repeated token id. Two prompts that begin with the same runs begin with
# the same tokens; different runs never share a token id. Block hashes chain over all tokens before,
# so a prefix cache can tell no more apart. Token ids:
#
#     [0, 2**30)      of one request alone: its own text 2 * index, its answer 2 * index + 1
#     [2**30, 2**31)  shared: a system prompt, or a hash id of a trace file

Segment = tuple[int, int]
"""(token id, how many times)."""

_FIRST_SHARED_ID = 2**30
MAX_REQUESTS = _FIRST_SHARED_ID // 2


def shared_segment(identity: int, num_tokens: int) -> Segment:
    """Text that requests share, by the number that names it."""
    return _FIRST_SHARED_ID + identity % (_FIRST_SHARED_ID - 1), num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A later turn of a chat."""

    think_s: float
    """Seconds from the end of the last answer to the arrival of this turn."""
    num_text_tokens: int
    num_output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Its prompt is `context` (shared text, or the turns before) and `num_text_tokens`
    of its own."""

    index: int
    """Unique in the trace."""
    arrival_s: float
    num_text_tokens: int
    num_output_tokens: int
    context: tuple[Segment, ...] = ()
    session: int | None = None
    """The same for all requests of one chat."""
    later_turns: tuple[Turn, ...] = ()
    tenant: str | None = None
    priority: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        if not self.num_text_tokens:
            return self.context
        return (*self.context, (2 * self.index, self.num_text_tokens))

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_text_tokens + sum(length for _, length in self.context)

    @property
    def output_token_id(self) -> int:
        """Every token of its answer."""
        return 2 * self.index + 1

    def prompt(self) -> "array[int]":
        """Token ids of 4 bytes each."""
        token_ids = array("I")
        for token_id, length in self.segments:
            token_ids += array("I", (token_id,)) * length
        return token_ids

    def next_turn(self, finished_s: float) -> "TraceRequest | None":
        """The chat's next request, whose prompt is all that was said; None after the last turn."""
        if not self.later_turns:
            return None
        turn, *later = self.later_turns
        return dataclasses.replace(
            self,
            index=self.index + 1,
            arrival_s=finished_s + turn.think_s,
            num_text_tokens=turn.num_text_tokens,
            num_output_tokens=turn.num_output_tokens,
            context=(*self.segments, (self.output_token_id, self.num_output_tokens)),
            later_turns=tuple(later),
        )


def take_part(
    requests: Iterable[TraceRequest],
    *,
    rate_scale: float = 1.0,
    skip_s: float = 0.0,
    duration_s: float | None = None,
    max_requests: int | None = None,
    delay_s: float = 0.0,
) -> Iterator[TraceRequest]:
    """A part of a trace, at another rate.

    Args:
        rate_scale: factor of the arrival rate; think times stay.
        skip_s: leave out what arrives before this time of the trace's own clock; the rest is
            shifted to begin at 0.
        duration_s: of the trace's own clock, from `skip_s` on; None for all.
        max_requests: without the later turns of chats.
        delay_s: added to every arrival, after scaling.
    """
    stop_s = math.inf if duration_s is None else skip_s + duration_s
    part = itertools.takewhile(
        lambda request: request.arrival_s < stop_s,
        itertools.dropwhile(lambda request: request.arrival_s < skip_s, requests),
    )
    for request in itertools.islice(part, max_requests):
        arrival_s = (request.arrival_s - skip_s) / rate_scale + delay_s
        yield dataclasses.replace(request, arrival_s=arrival_s)


# ---------------------------------------------------------------------- files


MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of each hash id."""
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Azure(msgspec.Struct, frozen=True):
    time: datetime.datetime = msgspec.field(name="TIMESTAMP")
    num_prompt_tokens: _Count = msgspec.field(name="ContextTokens")
    num_output_tokens: _Count = msgspec.field(name="GeneratedTokens")
    hash_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def time_s(self) -> float:
        time = self.time if self.time.tzinfo else self.time.replace(tzinfo=datetime.UTC)
        return time.timestamp()


class _BurstGPT(msgspec.Struct, frozen=True):
    time_s: float = msgspec.field(name="Timestamp")
    num_prompt_tokens: _Count = msgspec.field(name="Request tokens")
    num_output_tokens: _Count = msgspec.field(name="Response tokens")
    hash_ids: ClassVar[tuple[int, ...]] = ()


class _Mooncake(msgspec.Struct, frozen=True):
    """A row in a line of JSON; the others are CSV."""

    time_ms: float = msgspec.field(name="timestamp")
    num_prompt_tokens: _Count = msgspec.field(name="input_length")
    num_output_tokens: _Count = msgspec.field(name="output_length")
    hash_ids: tuple[int, ...] = ()

    @property
    def time_s(self) -> float:
        return self.time_ms / 1000


_Row = _Azure | _BurstGPT | _Mooncake
FORMATS: dict[str, type[_Row]] = {"azure": _Azure, "mooncake": _Mooncake, "burstgpt": _BurstGPT}


class TraceFile:
    """A trace in a public format, read a row at a time and anew for each iteration.

    Times are shifted so that the first request arrives at 0. A row without prompt or answer is a
    request that failed where it was recorded: it is skipped and counted."""

    def __init__(self, path: Path, file_format: str) -> None:
        if file_format not in FORMATS:
            raise TraceError(
                f"the trace format is {file_format!r}, it must be one of {', '.join(FORMATS)}"
            )
        self.name = f"{file_format}, {path.name}"
        self._path = path
        self._row_type = FORMATS[file_format]
        self.num_skipped = 0
        """Rows that are no requests; complete after the last request."""

    def __iter__(self) -> Iterator[TraceRequest]:
        self.num_skipped = index = 0
        first_s = last_s = None
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as file:
                for line, row in self._rows(file):
                    self._check(line, row, last_s)
                    last_s = row.time_s
                    if not row.num_output_tokens or not row.num_prompt_tokens:
                        self.num_skipped += 1
                        continue
                    first_s = row.time_s if first_s is None else first_s
                    yield _request(index, row, row.time_s - first_s)
                    index += 1
        except OSError as error:
            raise TraceError(f"cannot read {self._path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise TraceError(f"{self._path} is no text in UTF-8: {error.reason}") from None

    def _rows(self, file: TextIO) -> Iterator[tuple[int, _Row]]:
        line = 0
        row: Any = None
        try:
            if self._row_type is _Mooncake:
                decoder = msgspec.json.Decoder(_Mooncake)
                for line, text in enumerate(map(str.strip, file), start=1):
                    row = text
                    if text:
                        yield line, decoder.decode(text)
            else:
                reader = csv.DictReader(file, skipinitialspace=True)
                for row in reader:
                    line = reader.line_num
                    yield line, msgspec.convert(row, self._row_type, strict=False)
        except msgspec.MsgspecError as error:
            raise self._error(line, f"{row!r:.200}: {error}; choose another format?") from None

    def _check(self, line: int, row: _Row, last_s: float | None) -> None:
        if not math.isfinite(row.time_s):
            raise self._error(line, f"the time is {row.time_s}, it must be finite")
        if last_s is not None and row.time_s < last_s:
            raise self._error(
                line,
                f"the time {row.time_s} s lies before that of the row above, {last_s} s; sort the "
                "file by time",
            )
        most = -(-row.num_prompt_tokens // MOONCAKE_BLOCK_TOKENS)
        if len(row.hash_ids) > most:
            raise self._error(
                line,
                f"{len(row.hash_ids)} hash ids for a prompt of {row.num_prompt_tokens} tokens, "
                f"{most} blocks of {MOONCAKE_BLOCK_TOKENS} are the most",
            )

    def _error(self, line: int, text: str) -> TraceError:
        return TraceError(f"{self._path}, line {line}: {text}")


def _request(index: int, row: _Row, arrival_s: float) -> TraceRequest:
    context: list[Segment] = []
    num_left = row.num_prompt_tokens
    for hash_id in row.hash_ids:
        length = min(num_left, MOONCAKE_BLOCK_TOKENS)
        context.append(shared_segment(hash_id, length))
        num_left -= length
    return TraceRequest(
        index=index,
        arrival_s=arrival_s,
        num_text_tokens=num_left,
        num_output_tokens=row.num_output_tokens,
        context=tuple(context),
    )
