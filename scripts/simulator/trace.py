"""Traces: requests in order of arrival, as lengths and contents, and the files that hold them."""

import csv
import dataclasses
import datetime
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from scripts.simulator import SimulationError

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
    """From the end of the last answer to the arrival of this turn."""
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

    def prompt_token_ids(self) -> list[int]:
        return self.prompt().tolist()

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
    for name, value in (("rate_scale", rate_scale), ("duration_s", duration_s)):
        if value is not None and not value > 0:
            raise SimulationError(f"{name} is {value}, it must be above 0")
    for name, value in (("skip_s", skip_s), ("delay_s", delay_s)):
        if not value >= 0:
            raise SimulationError(f"{name} is {value}, it must be at least 0")
    if max_requests is not None and max_requests < 1:
        raise SimulationError(f"num_requests is {max_requests}, it must be at least 1")
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
"""Of each hash id."""
FORMATS = ("azure", "mooncake", "burstgpt")


def azure_time_s(text: str) -> float:
    """`2023-11-16 18:15:46.6805900`, with or without a zone; in seconds since 1970."""
    time = datetime.datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


_CSV: dict[str, tuple[tuple[str, str, str], Callable[[str], float]]] = {
    "azure": (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), azure_time_s),
    "burstgpt": (("Timestamp", "Request tokens", "Response tokens"), float),
}


class _Row(msgspec.Struct, frozen=True):
    """A line of a Mooncake trace; the others are brought to its form."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class TraceFile:
    """A trace in a public format, read a row at a time.

        azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens
        burstgpt   CSV: Timestamp (s), Request tokens, Response tokens
        mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids

    Times are shifted so that the first request arrives at 0. A row without prompt or answer is a
    request that failed where it was recorded: it is skipped and counted.

    Args:
        path: read anew for each iteration.
        file_format: one of FORMATS.
    """

    def __init__(self, path: Path, file_format: str) -> None:
        if file_format not in FORMATS:
            raise SimulationError(
                f"the trace format is {file_format!r}, it must be one of {', '.join(FORMATS)}"
            )
        self._path = path
        self._format = file_format
        self.num_skipped = 0
        """Rows that are no requests; complete after the last request."""

    @property
    def name(self) -> str:
        return f"{self._format}, {self._path.name}"

    def __iter__(self) -> Iterator[TraceRequest]:
        self.num_skipped = index = 0
        first_ms = last_ms = None
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as file:
                read = self._json_rows if self._format == "mooncake" else self._csv_rows
                for line, row in read(file):
                    self._check(line, row, last_ms)
                    last_ms = row.timestamp
                    if not row.output_length or not row.input_length:
                        self.num_skipped += 1
                        continue
                    first_ms = row.timestamp if first_ms is None else first_ms
                    yield _request(index, row, (row.timestamp - first_ms) / 1000)
                    index += 1
        except OSError as error:
            raise SimulationError(f"cannot read {self._path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SimulationError(f"{self._path} is no text in UTF-8: {error.reason}") from None

    def _json_rows(self, file: TextIO) -> Iterator[tuple[int, _Row]]:
        decoder = msgspec.json.Decoder(_Row)
        for line, text in enumerate(file, start=1):
            if text.strip():
                try:
                    yield line, decoder.decode(text)
                except msgspec.MsgspecError as error:
                    raise self._error(line, f"{text.strip()!r:.80}: {error}") from None

    def _csv_rows(self, file: TextIO) -> Iterator[tuple[int, _Row]]:
        columns, time_s = _CSV[self._format]
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in columns if name not in header]
        if missing:
            raise self._error(
                1, f"no column {', '.join(missing)} among {header}; choose another format"
            )
        for row in filter(None, reader):
            line = reader.line_num
            values = dict(zip(header, map(str.strip, row), strict=False))
            if len(values) < len(header):
                raise self._error(line, f"{len(row)} values in {row}, {len(header)} are needed")
            numbers = []
            for column, kind in zip(columns, (time_s, int, int), strict=True):
                try:
                    numbers.append(kind(values[column]))
                except ValueError:
                    wanted = "whole number" if kind is int else "time"
                    raise self._error(
                        line, f"{column} is {values[column]!r}, it must be a {wanted}"
                    ) from None
            yield line, _Row(1000 * numbers[0], int(numbers[1]), int(numbers[2]))

    def _check(self, line: int, row: _Row, last_ms: float | None) -> None:
        for name, value in (("prompt", row.input_length), ("answer", row.output_length)):
            if value < 0:
                raise self._error(line, f"the {name} has {value} tokens, least is 0")
        if not math.isfinite(row.timestamp):
            raise self._error(line, f"the time is {row.timestamp}, it must be finite")
        if last_ms is not None and row.timestamp < last_ms:
            raise self._error(
                line,
                f"the time {row.timestamp / 1000} s lies before that of the row above, "
                f"{last_ms / 1000} s; sort the file by time",
            )
        most = -(-row.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(row.hash_ids) > most:
            raise self._error(
                line,
                f"{len(row.hash_ids)} hash ids for a prompt of {row.input_length} tokens, {most} "
                f"blocks of {MOONCAKE_BLOCK_TOKENS} are the most",
            )

    def _error(self, line: int, text: str) -> SimulationError:
        return SimulationError(f"{self._path}, line {line}: {text}")


def _request(index: int, row: _Row, arrival_s: float) -> TraceRequest:
    context: list[Segment] = []
    num_left = row.input_length
    for hash_id in row.hash_ids:
        length = min(num_left, MOONCAKE_BLOCK_TOKENS)
        context.append(shared_segment(hash_id, length))
        num_left -= length
    return TraceRequest(
        index=index,
        arrival_s=arrival_s,
        num_text_tokens=num_left,
        num_output_tokens=row.output_length,
        context=tuple(context),
    )
