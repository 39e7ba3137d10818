"""Writes what a daemon's run was asked and decided, so that it can be replayed (`--trace FILE`).

JSON lines, gzip if the name ends in ".gz". What was written stays readable if the process dies.
"""

import gzip
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import msgspec
import numpy as np

from engine_core.observers import FinishedStep, StepObserver
from engine_core.scheduler.plan import ModelRunnerOutput, SchedulerOutput
from engine_core.trace.reader import (
    FORMAT_VERSION,
    TraceAbort,
    TraceArrival,
    TraceCacheReset,
    TraceEvent,
    TraceHeader,
    TraceLogprobs,
    TracePlan,
    TraceStep,
)
from protocol.requests import EngineRequest

logger = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 1.0


class TraceWriter(StepObserver):
    """
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
        self._file: BinaryIO | None = _open_for_writing(self._path)
        self._flushed_s = started_s
        # a line at a time, but for gzip, which each flush makes larger
        self._flush_interval_s = _FLUSH_INTERVAL_S if self._path.suffix == ".gz" else 0.0
        self._write(TraceHeader(FORMAT_VERSION, model, dict(config or {})), started_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        )
        self._write(event, now_s)

    def on_abort(self, request_ids: Collection[str], now_s: float) -> None:
        self._write(TraceAbort(at_s=now_s - self._started_s, ids=list(request_ids)), now_s)

    def on_cache_reset(self, now_s: float) -> None:
        self._write(TraceCacheReset(at_s=now_s - self._started_s), now_s)

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
            beam_logprobs=self._beam_logprobs(output) if self._beams else {},
            failures=output.failures,
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
        ended = {_request_of(name) for name in plan.finished_req_ids} & self._beams.keys()
        for request_id in ended:
            self._beams[request_id].difference_update(plan.finished_req_ids)
        for new in plan.scheduled_new_reqs:
            if (names := self._beams.get(_request_of(new.req_id))) is not None:
                names.add(new.req_id)
        for request_id in ended:
            if not self._beams[request_id]:
                del self._beams[request_id]

    def _beam_logprobs(self, sampled: ModelRunnerOutput) -> dict[str, TraceLogprobs]:
        """What beams are chosen by."""
        return {
            req_id: TraceLogprobs(
                width=columns.width,
                token_ids=np.frombuffer(columns.token_ids, "<i4").tolist(),
                logprobs=columns.logprobs,
                ranks=columns.ranks,
            )
            for req_id, columns in (sampled.logprobs or {}).items()
            if req_id in self._beams.get(_request_of(req_id), ())
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
            self.close()


def _open_for_writing(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "wb", compresslevel=1))
    return path.open("wb")


def _request_of(sequence_id: str) -> str:
    """ "ID" and "ID#1" are sequences of request "ID"; no request's id ends like the latter."""
    request_id, _, serial = sequence_id.rpartition("#")
    return request_id if request_id and serial.isdecimal() else sequence_id
