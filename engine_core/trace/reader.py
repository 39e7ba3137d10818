"""The lines of a trace (`--trace FILE`) and their reading. `engine_core.trace.writer` writes them.

    {"engine-core trace": 1, "model": ..., "config": {...}}
    {"event": "arrive", "at_s": 0.5, "id": "a", "num_prompt_tokens": 9, ...}
    {"event": "step", "id": 0, "start_s": 0.5, "duration_s": 0.02, "ids": ["a"], "nums": [9], ...}
    {"event": "abort", "at_s": 0.6, "ids": ["a"]}

The order of the lines is the order in which the scheduler saw the events. A "step" is planned and
updated at once; where other steps are in flight meanwhile, a line of its own says when it was
planned, and the step's line follows when its result was known:

    {"event": "plan", "id": 0, "at_s": 0.5}
    {"event": "plan", "id": 1, "at_s": 0.51}
    {"event": "step", "id": 0, "start_s": 0.5, ...}
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np

from engine_core.scheduler.plan import ModelRunnerOutput
from protocol.outputs import Logprobs
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


class TraceAbort(_Event, frozen=True, kw_only=True, tag="abort"):
    at_s: float
    ids: list[str]


class TraceCacheReset(_Event, frozen=True, kw_only=True, tag="cache_reset"):
    at_s: float


class TracePlan(_Event, frozen=True, kw_only=True, tag="plan"):
    at_s: float
    id: int
    """The step's, whose own line comes later; or never, if the writer died."""


class TraceLogprobs(msgspec.Struct, frozen=True):
    width: int
    token_ids: list[int]
    logprobs: bytes
    """float32, little-endian; base64 in the file."""
    ranks: list[int]


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
    """Instead: steps with drafts, steps that failed."""
    beam_logprobs: dict[str, TraceLogprobs] = {}
    """Of beams only: the scheduler chooses by them."""
    failures: dict[str, str] = {}

    @property
    def sequences(self) -> list[str]:
        """`ids` as `read_trace` gives them."""
        return self.ids or []

    @property
    def was_discarded(self) -> bool:
        """The model runner raised an error, and the step was discarded."""
        return bool(self.nums) and self.sampled_by_id == {}

    def model_output(self) -> ModelRunnerOutput:
        """What the model runner gave to the scheduler."""
        logprobs = {
            req_id: Logprobs(
                num_positions=len(kept.ranks),
                width=kept.width,
                token_ids=np.array(kept.token_ids, "<i4").tobytes(),
                logprobs=kept.logprobs,
                ranks=kept.ranks,
            )
            for req_id, kept in self.beam_logprobs.items()
        }
        by_id = self.sampled_by_id
        if self.sampled is not None:
            return ModelRunnerOutput(
                req_ids=self.sequences,
                sampled_token_ids=np.array(self.sampled, np.int32),
                logprobs=logprobs or None,
                failures=self.failures,
            )
        return ModelRunnerOutput(
            req_ids=list(by_id or ()),
            sampled_token_ids=list((by_id or {}).values()),
            logprobs=logprobs or None,
            failures=self.failures,
        )


TraceEvent = TraceArrival | TraceAbort | TraceCacheReset | TracePlan | TraceStep


def read_header(path: str | Path) -> TraceHeader:
    """
    Raises:
        OSError: the file cannot be read.
        TraceFormatError: it is no trace.
    """
    with _open_for_reading(Path(path)) as file:
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
    with _open_for_reading(Path(path)) as file:
        lines = _whole_lines(path, file)
        _header_of(path, next(lines, b""))
        for number, line in enumerate(lines, start=2):
            try:
                event = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceFormatError(f"{path}: line {number} is no event: {error}") from error
            if isinstance(event, TraceStep):
                if event.ids is None:
                    event = msgspec.structs.replace(event, ids=last_ids)
                last_ids = event.sequences
            yield event


def _header_of(path: str | Path, line: bytes) -> TraceHeader:
    try:
        header = msgspec.json.decode(line, type=TraceHeader)
    except msgspec.DecodeError as error:
        raise TraceFormatError(
            f"{path} does not begin like a trace ({error}); make one with --trace"
        ) from error
    if header.version != FORMAT_VERSION:
        raise TraceFormatError(
            f"{path} is a trace of version {header.version}, this program reads "
            f"{FORMAT_VERSION}; use the program that wrote it"
        )
    return header


def _open_for_reading(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


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
