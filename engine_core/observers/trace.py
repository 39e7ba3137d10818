"""Writes a trace (`--trace FILE`), for a replay."""

import contextlib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from engine_core.observers.base import ControlMethod, FinishedStep, StepObserver
from engine_core.observers.beam_logprobs import TracedBeams
from engine_core.observers.trace_lines import (
    FORMAT_VERSION,
    TraceAbort,
    TraceArrival,
    TraceCacheReset,
    TraceControl,
    TraceEvent,
    TraceHeader,
    TracePlan,
    TraceStep,
    open_trace,
)
from engine_core.scheduler.plan import SchedulerOutput
from protocol.requests import EngineRequest

logger = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 1.0


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
        self._beams = TracedBeams()
        self._last_ids: list[str] = []
        self._planned: set[int] = set()
        self._file: BinaryIO | None = open_trace(self._path, "wb")
        self._flushed_s = started_s
        # a line at a time, but for gzip, which each flush makes larger
        self._flush_interval_s = _FLUSH_INTERVAL_S if self._path.suffix == ".gz" else 0.0
        self._write(TraceHeader(FORMAT_VERSION, model, dict(config or {})), started_s)

    def on_arrival(self, message: EngineRequest, client_index: int, now_s: float) -> None:
        self._beams.on_arrival(message)
        event = TraceArrival.of(message, client_index, now_s - self._started_s)
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
            beam_logprobs=self._beams.logprobs_of(plan, output),
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
