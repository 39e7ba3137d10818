"""Traces in the public formats, read a row at a time. Knows files, not engines.

    azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens
    mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (512-token blocks)
    burstgpt   CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type

Times are shifted so that the first row arrives at 0. A row without an answer (0 tokens) is a
request that failed where it was recorded: it is skipped and counted.
"""

import csv
import datetime
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from scripts.simulator.errors import SimulationError
from scripts.simulator.trace import Segment, TraceRequest, shared_segment

MOONCAKE_BLOCK_TOKENS = 512


class _Row(msgspec.Struct, frozen=True):
    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class TraceFile:
    """
    Args:
        path: read anew for each iteration.
        file_format: azure, mooncake or burstgpt.

    Raises:
        SimulationError: an unknown format; while reading: file, line and what is wrong there.
    """

    def __init__(self, path: Path, file_format: str) -> None:
        if file_format not in _READERS:
            raise SimulationError(
                f"the trace format is {file_format!r}, it must be one of {', '.join(_READERS)}"
            )
        self._path = path
        self._format = file_format
        self._num_skipped = 0

    @property
    def name(self) -> str:
        return f"{self._format}, {self._path.name}"

    @property
    def num_skipped(self) -> int:
        return self._num_skipped

    def __iter__(self) -> Iterator[TraceRequest]:
        self._num_skipped = 0
        index = 0
        first_s = last_s = None
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as file:
                for line, row in _READERS[self._format](self._path, file):
                    self._check(line, row, last_s)
                    last_s = row.time_s
                    if not row.num_output_tokens or not row.num_prompt_tokens:
                        self._num_skipped += 1
                        continue
                    first_s = row.time_s if first_s is None else first_s
                    yield _request(index, row, row.time_s - first_s)
                    index += 1
        except OSError as error:
            raise SimulationError(f"cannot read {self._path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SimulationError(f"{self._path} is no text in UTF-8: {error.reason}") from None

    def _check(self, line: int, row: _Row, last_s: float | None) -> None:
        where = f"{self._path}, line {line}"
        for name, value in (("prompt", row.num_prompt_tokens), ("answer", row.num_output_tokens)):
            if value < 0:
                raise SimulationError(f"{where}: the {name} has {value} tokens, least is 0")
        if not math.isfinite(row.time_s):
            raise SimulationError(f"{where}: the time is {row.time_s}, it must be finite")
        if last_s is not None and row.time_s < last_s:
            raise SimulationError(
                f"{where}: the time {row.time_s} s lies before that of the row above, {last_s} s; "
                "sort the file by time"
            )
        most = -(-row.num_prompt_tokens // MOONCAKE_BLOCK_TOKENS)
        if len(row.hash_ids) > most:
            raise SimulationError(
                f"{where}: {len(row.hash_ids)} hash ids for a prompt of {row.num_prompt_tokens} "
                f"tokens, {most} blocks of {MOONCAKE_BLOCK_TOKENS} are the most"
            )


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


def _read_csv(
    path: Path, file: TextIO, columns: tuple[str, str, str], time_s: Callable[[str], float]
) -> Iterator[tuple[int, _Row]]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in columns if name not in header]
    if missing:
        raise SimulationError(
            f"{path}, line 1: no column {', '.join(missing)} among {header}; choose another format"
        )
    places = [header.index(name) for name in columns]
    for row in reader:
        if not row:
            continue
        line = reader.line_num
        if len(row) <= max(places):
            raise SimulationError(
                f"{path}, line {line}: {len(row)} values in {row}, {len(header)} are needed"
            )
        values = [row[place].strip() for place in places]
        time = _number(path, line, columns[0], values[0], time_s)
        prompt, answer = (int(_number(path, line, columns[i], values[i], int)) for i in (1, 2))
        yield line, _Row(time, prompt, answer)


def _number(
    path: Path, line: int, column: str, text: str, convert: Callable[[str], float]
) -> float:
    try:
        return convert(text)
    except ValueError:
        raise SimulationError(
            f"{path}, line {line}: {column} is {text!r}, it must be a "
            f"{'whole number' if convert is int else 'time'}"
        ) from None


def azure_time_s(text: str) -> float:
    """`2023-11-16 18:15:46.6805900`, with or without a zone; in seconds since 1970."""
    time = datetime.datetime.fromisoformat(text)
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return time.timestamp()


def _read_azure(path: Path, file: TextIO) -> Iterator[tuple[int, _Row]]:
    return _read_csv(path, file, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), azure_time_s)


def _read_burstgpt(path: Path, file: TextIO) -> Iterator[tuple[int, _Row]]:
    return _read_csv(path, file, ("Timestamp", "Request tokens", "Response tokens"), float)


def _read_mooncake(path: Path, file: TextIO) -> Iterator[tuple[int, _Row]]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise SimulationError(f"{path}, line {line}: {text.strip()!r:.80}: {error}") from None
        yield (
            line,
            _Row(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids),
        )


_READERS: dict[str, Callable[[Path, TextIO], Iterator[tuple[int, _Row]]]] = {
    "azure": _read_azure,
    "mooncake": _read_mooncake,
    "burstgpt": _read_burstgpt,
}
