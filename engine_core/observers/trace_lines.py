"""The lines of a trace (`--trace FILE`): what a daemon's run was asked and decided, for a replay.
JSON, gzip if the file's name ends in ".gz". What was written stays readable if the process dies.

    {"engine-core trace": 1, "model": ..., "config": {...}}
    {"event": "arrive", "at_s": 0.5, "id": "a", "num_prompt_tokens": 9, ...}
    {"event": "step", "id": 0, "start_s": 0.5, "duration_s": 0.02, "ids": ["a"], "nums": [9], ...}
    {"event": "abort", "at_s": 0.6, "ids": ["a"]}
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import msgspec
import numpy as np

from engine_core.observers.base import ControlMethod
from engine_core.observers.beam_logprobs import TraceLogprobs
from engine_core.scheduler.runner_output import ModelRunnerOutput
from protocol.codec import understood
from protocol.errors import MalformedMessage
from protocol.pooling import PoolingParams
from protocol.private_files import overwrite_private_file
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams

FORMAT_VERSION = 1


class TraceFormatError(Exception):
    """A file is no trace, or one that this version cannot read."""


class TraceHeader(msgspec.Struct, frozen=True, rename={"version": "engine-core trace"}):
    version: int
    model: str
    config: dict[str, Any]
    """Whatever settings the writer's configuration had."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """Base of all lines but the first. Times in seconds since the trace's start."""


class TraceArrival(_Event, frozen=True, kw_only=True, tag="arrive"):
    at_s: float
    id: str
    num_prompt_tokens: int
    max_tokens: int
    prompt: list[int]
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    output_token_ids: list[int] = []
    num_sequences: int = 1
    beam_search: BeamSearchParams | None = None
    priority: int = 0
    tenant: str | None = None
    client_index: int = 0
    salt: str | None = None
    adapter: str | None = None
    timeout_s: float | None = None
    pooling_params: PoolingParams | None = None

    @classmethod
    def of(cls, message: EngineRequest, client_index: int, at_s: float) -> "TraceArrival":
        params = message.sampling_params
        return cls(
            at_s=at_s,
            id=message.request_id,
            num_prompt_tokens=len(message.prompt_token_ids),
            prompt=message.prompt_token_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=list(params.stop_token_ids),
            output_token_ids=message.output_token_ids,
            num_sequences=message.num_sequences,
            beam_search=message.beam_search,
            priority=message.priority,
            tenant=message.tenant,
            client_index=client_index,
            salt=message.cache_salt,
            adapter=message.adapter,
            timeout_s=message.timeout_s,
            pooling_params=message.pooling_params,
        )


class TraceAbort(_Event, frozen=True, kw_only=True, tag="abort"):
    at_s: float
    ids: list[str]
    index: int | None = None
    """Only this sample of theirs; None: all."""


class TraceCacheReset(_Event, frozen=True, kw_only=True, tag="cache_reset"):
    at_s: float


class TraceControl(_Event, frozen=True, kw_only=True, tag="control"):
    """A pause, a sleep or new weights."""

    at_s: float
    what: ControlMethod
    arguments: list[str | int] = []
    next_step: int
    """The id of the plan that follows."""


class TracePlan(_Event, frozen=True, kw_only=True, tag="plan"):
    at_s: float
    id: int
    """The step's, whose own line comes later; or never, if the writer died."""


class TraceStep(_Event, frozen=True, kw_only=True, tag="step"):
    id: int
    start_s: float
    duration_s: float
    ids: list[str] | None = None
    """Sequences in batch order. In the file absent if the last step's; the reader fills it in."""
    nums: list[int]
    """Tokens of each in this step."""
    context: list[int]
    """Tokens of each in the cache before."""
    new: list[str] = []
    resumed: list[str] = []
    preempted: list[str] = []
    finished: list[str] = []
    """Gone since the step before."""
    copies: tuple[int, int, int] = (0, 0, 0)
    """Blocks swapped in, swapped out, copied on the device."""
    sampled: list[int] | None = None
    """One token for each of `ids`, not meant where the prompt was not finished."""
    sampled_by_id: dict[str, list[int]] | None = None
    """Instead: several decode steps of a plan, steps that failed."""
    verified: dict[str, list[int]] = {}
    """Beside `sampled`, of sequences with drafts: the accepted ones and one token more."""
    beam_logprobs: dict[str, TraceLogprobs] = {}
    """Log-probabilities of beams only: the scheduler chooses by them."""
    failures: dict[str, str] = {}
    refused: set[str] = set()
    pooled: list[str] = []
    """Requests that were answered, without what."""

    @property
    def sequences(self) -> list[str]:
        """`ids` as `read_trace` gives them."""
        return self.ids or []

    @property
    def was_discarded(self) -> bool:
        """The model runner raised an error, and the step was discarded."""
        return bool(self.nums) and self.sampled_by_id == {}

    def model_output(self) -> ModelRunnerOutput:
        """The output that the model runner gave to the scheduler."""
        logprobs = {req_id: kept.columns() for req_id, kept in self.beam_logprobs.items()}
        by_id, in_order = self.sampled_by_id or {}, self.sampled
        return ModelRunnerOutput(
            req_ids=list(by_id) if in_order is None else self.sequences,
            sampled_token_ids=(
                list(by_id.values()) if in_order is None else np.array(in_order, np.int32)
            ),
            logprobs=logprobs or None,
            verified_token_ids=self.verified,
            failures=self.failures,
            refused=self.refused,
            pooled={name: np.zeros(1, np.float32) for name in self.pooled},
        )


TraceEvent = TraceArrival | TraceAbort | TraceCacheReset | TraceControl | TracePlan | TraceStep


def open_trace(path: Path, mode: Literal["rb", "wb"]) -> BinaryIO:
    if mode == "wb" and (path.is_file() or not path.exists()):
        overwrite_private_file(path).close()  # nobody else's before a prompt is in it
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, mode, compresslevel=1))
    return path.open(mode)


def read_header(path: str | Path) -> TraceHeader:
    """
    Raises:
        OSError: the file cannot be read.
        TraceFormatError: it is no trace.
    """
    with open_trace(Path(path), "rb") as file:
        return _header_of(path, next(_whole_lines(path, file), b""))


def read_trace(path: str | Path) -> Iterator[TraceEvent]:
    """The events of a trace, one after another; what a dying writer left half-written at the end
    is skipped.

    Raises:
        OSError: the file cannot be read.
        TraceFormatError: it is no trace, or a line in it is none.
    """
    decoder = msgspec.json.Decoder(TraceEvent)
    last_ids: list[str] = []
    with open_trace(Path(path), "rb") as file:
        lines = _whole_lines(path, file)
        _header_of(path, next(lines, b""))
        for number, line in enumerate(lines, start=2):
            try:
                event = understood(decoder.decode, line, "an event")
            except MalformedMessage as error:
                raise TraceFormatError(f"{path}: line {number} is no event: {error}") from error
            if isinstance(event, TraceStep):
                if event.ids is None:
                    event = msgspec.structs.replace(event, ids=last_ids)
                last_ids = event.sequences
            yield event


def _header_of(path: str | Path, line: bytes) -> TraceHeader:
    try:
        header = understood(msgspec.json.Decoder(TraceHeader).decode, line, "a header")
    except MalformedMessage as error:
        raise TraceFormatError(
            f"{path} does not begin like a trace ({error}); make one with --trace"
        ) from error
    if header.version != FORMAT_VERSION:
        raise TraceFormatError(
            f"{path} is a trace of version {header.version}, this program reads "
            f"{FORMAT_VERSION}; use the program that wrote it"
        )
    return header


def _whole_lines(path: str | Path, file: BinaryIO) -> Iterator[bytes]:
    """Lines that end in a line feed. A gzip stream may end anywhere."""
    try:
        for line in file:
            if line.endswith(b"\n"):
                yield line
    except gzip.BadGzipFile as error:
        raise TraceFormatError(
            f"{path} is no gzip file: {error}; take the .gz off its name"
        ) from error
    except (EOFError, zlib.error):
        return
