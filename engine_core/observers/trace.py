"""A trace (`--trace FILE`) of what a daemon's run was asked and decided, for a replay. JSON lines,
gzip if the name ends in ".gz". What was written stays readable if the process dies.

    {"engine-core trace": 1, "model": ..., "config": {...}}
    {"event": "arrive", "at_s": 0.5, "id": "a", "num_prompt_tokens": 9, ...}
    {"event": "step", "id": 0, "start_s": 0.5, "duration_s": 0.02, "ids": ["a"], "nums": [9], ...}
    {"event": "abort", "at_s": 0.6, "ids": ["a"]}
"""

import contextlib
import gzip
import logging
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import msgspec
import numpy as np

from engine_core.observers.base import ControlMethod, FinishedStep, StepObserver
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.request import request_of
from engine_core.scheduler.runner_output import ModelRunnerOutput
from protocol.codec import understood
from protocol.errors import MalformedMessage
from protocol.outputs import Logprobs
from protocol.pooling import PoolingParams
from protocol.private_files import overwrite_private_file
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_FLUSH_INTERVAL_S = 1.0


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


class TraceWriter(StepObserver):
    """The order of the lines is the order in which the scheduler saw the events. A "step" is
    planned and updated at once; where other steps are in flight meanwhile, a line of its own says
    when it was planned, and the step's line follows when its result was known:

        {"event": "plan", "id": 0, "at_s": 0.5}
        {"event": "plan", "id": 1, "at_s": 0.51}
        {"event": "step", "id": 0, "start_s": 0.5, ...}

    Args:
        path: of the file, replaced if it is there.
        started_s: what the loop's clock shows at 0.
        model: its name, for the reader's eyes.
        config: all settings of scheduler and cache.
        max_steps_in_flight: with 1 each step's own line says when it was planned.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        started_s: float,
        model: str = "",
        config: Mapping[str, Any] | None = None,
        max_steps_in_flight: int = 1,
    ) -> None:
        self._path = Path(path)
        self._started_s = started_s
        self._writes_plans = max_steps_in_flight > 1
        self._encoder = msgspec.json.Encoder()
        self._beams: dict[str, set[str]] = {}
        self._last_ids: list[str] = []
        self._planned: set[int] = set()
        self._file: BinaryIO | None = _open(self._path, "wb")
        self._flushed_s = started_s
        # a line at a time, but for gzip, which each flush makes larger
        self._flush_interval_s = _FLUSH_INTERVAL_S if self._path.suffix == ".gz" else 0.0
        self._write(TraceHeader(FORMAT_VERSION, model, dict(config or {})), started_s)

    def on_arrival(self, message: EngineRequest, client_index: int, now_s: float) -> None:
        params = message.sampling_params
        if message.beam_search is not None:
            self._beams[message.request_id] = {message.request_id}
        event = TraceArrival(
            at_s=now_s - self._started_s,
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
        self._write(event, now_s)

    def on_abort(
        self, request_ids: Collection[str], now_s: float, index: int | None = None
    ) -> None:
        at_s = now_s - self._started_s
        self._write(TraceAbort(at_s=at_s, ids=list(request_ids), index=index), now_s)

    def on_cache_reset(self, now_s: float) -> None:
        self._write(TraceCacheReset(at_s=now_s - self._started_s), now_s)

    def on_control(
        self, what: ControlMethod, arguments: tuple[str | int, ...], next_step_id: int, now_s: float
    ) -> None:
        at_s, next_step = now_s - self._started_s, next_step_id
        event = TraceControl(at_s=at_s, what=what, arguments=list(arguments), next_step=next_step)
        self._write(event, now_s)

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        """A line where other steps may be planned before this one's result is known."""
        if self._writes_plans and (plan.total_num_scheduled_tokens or self._planned):
            self._planned.add(plan.step_id)
            self._write(TracePlan(at_s=now_s - self._started_s, id=plan.step_id), now_s)

    def on_step(self, step: FinishedStep) -> None:
        """A line, but for steps in which nothing ran and nothing was sent."""
        plan, output = step.plan, step.output
        was_planned = plan.step_id in self._planned
        if not (plan.total_num_scheduled_tokens or step.has_outputs or was_planned):
            return
        self._planned.discard(plan.step_id)
        batch = plan.batch
        same = batch.req_ids == self._last_ids
        self._last_ids = batch.req_ids
        tokens = output.sampled_token_ids
        if plan.num_decode_steps > 1 and isinstance(tokens, np.ndarray):
            counts = batch.num_scheduled_tokens.tolist()
            tokens = [row[:n] for row, n in zip(tokens.tolist(), counts, strict=True)]
        is_array = isinstance(tokens, np.ndarray)
        self._follow_beams(plan)
        event = TraceStep(
            id=plan.step_id,
            start_s=step.planned_s - self._started_s,
            duration_s=step.collected_s - step.planned_s,
            ids=None if same else batch.req_ids,
            nums=batch.num_scheduled_tokens.tolist(),
            context=batch.num_computed_tokens.tolist(),
            new=[new.req_id for new in plan.scheduled_new_reqs],
            resumed=[again.req_id for again in plan.resumed_reqs],
            preempted=plan.preempted_req_ids,
            finished=plan.finished_req_ids,
            copies=(len(plan.copies.swap_in), len(plan.copies.swap_out), len(plan.copies.copy)),
            sampled=tokens.tolist() if isinstance(tokens, np.ndarray) else None,
            sampled_by_id=None if is_array else dict(zip(output.req_ids, tokens, strict=True)),
            verified=dict(output.verified_token_ids),
            beam_logprobs=self._beam_logprobs(output) if self._beams else {},
            failures=output.failures,
            refused=output.refused,
            pooled=list(output.pooled),
        )
        self._write(event, step.collected_s)

    def close(self) -> None:
        """Write what is left. Nothing is written after."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.error("the end of the trace %s is lost: %s", self._path, error)

    # ------------------------------------------------------------------ lines

    def _follow_beams(self, plan: SchedulerOutput) -> None:
        """Beams get new names as a search goes on; a search is over when none is left."""
        if not self._beams:
            return
        ended = {request_of(name) for name in plan.finished_req_ids} & self._beams.keys()
        for request_id in ended:
            self._beams[request_id].difference_update(plan.finished_req_ids)
        for new in plan.scheduled_new_reqs:
            if (names := self._beams.get(request_of(new.req_id))) is not None:
                names.add(new.req_id)
        for request_id in ended:
            if not self._beams[request_id]:
                del self._beams[request_id]

    def _beam_logprobs(self, sampled: ModelRunnerOutput) -> dict[str, TraceLogprobs]:
        """The log-probabilities that beams are chosen by."""
        return {
            req_id: TraceLogprobs(
                width=columns.width,
                token_ids=np.frombuffer(columns.token_ids, "<i4").tolist(),
                logprobs=columns.logprobs,
                ranks=columns.ranks,
            )
            for req_id, columns in (sampled.logprobs or {}).items()
            if req_id in self._beams.get(request_of(req_id), ())
        }

    def _write(self, line: TraceHeader | TraceEvent, now_s: float) -> None:
        """A full disk ends the trace, never the engine."""
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
            if now_s - self._flushed_s >= self._flush_interval_s:
                self._flushed_s = now_s
                self._file.flush()
        except OSError as error:
            logger.error("the trace %s stops here: %s", self._path, error)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # what it holds back does not fit either
                file.close()


def _open(path: Path, mode: Literal["rb", "wb"]) -> BinaryIO:
    if mode == "wb" and (path.is_file() or not path.exists()):
        overwrite_private_file(path).close()  # nobody else's before a prompt is in it
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, mode, compresslevel=1))
    return path.open(mode)


# ------------------------------------------------------------------ reading


def read_header(path: str | Path) -> TraceHeader:
    """
    Raises:
        OSError: the file cannot be read.
        TraceFormatError: it is no trace.
    """
    with _open(Path(path), "rb") as file:
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
    with _open(Path(path), "rb") as file:
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
