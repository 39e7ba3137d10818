"""One engine in virtual time: the production scheduler and cache, and step times for the runner.

drain the inbox -> schedule(now) -> the step lasts model(plan) -> update_from_output(its end)"""

import dataclasses
import functools
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_core.kv_cache import KVCacheManager
from engine_core.kv_cache.changes import CacheChanges
from engine_core.scheduler import QueueFull, Request, SchedulerConfig
from engine_core.scheduler.batch_state import Int32Array
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.runner_output import ModelRunnerOutput
from engine_core.startup.scheduler import build_scheduler
from frontend.load.traces.trace import TraceRequest
from frontend.simulator import SimulationError
from frontend.simulator.metrics import RequestMetrics
from frontend.simulator.step_times import StepTimeModel, StepWork, work_of
from protocol.calls import EngineStatistics
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

_MAX_IDLE_STEPS = 10_000
_IDLE_STEP_S = 1e-3
"""Duration of a step that computes nothing, if the model says 0: time must go on."""


@dataclasses.dataclass(slots=True)
class EngineCounters:
    """Counts of one engine, over the whole run."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_step_tokens: int = 0
    num_step_sequences: int = 0
    block_seconds: float = 0.0
    peak_blocks: int = 0
    num_received: int = 0


@dataclasses.dataclass(slots=True)
class _Live:
    """A request that is here and not over."""

    traced: TraceRequest
    request: Request
    slot: int | None = None
    """Its slot in TokenTimes; None before its first step."""
    is_running: bool = False
    first_token_s: float | None = None


class SimulatedEngine:
    """`cache` is this engine's own; engines may share `metrics`."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        model: StepTimeModel,
        metrics: RequestMetrics,
    ) -> None:
        self._cache = cache
        self._scheduler = build_scheduler(config, self._cache)
        self._max_model_len = config.max_model_len
        self._model = model
        self._metrics = metrics
        self._inbox: list[TraceRequest] = []
        self._live: dict[str, _Live] = {}
        self._times = TokenTimes(config.max_num_seqs)
        self._steps: deque[tuple[SchedulerOutput, PlannedRows, float]] = deque()
        """Those that run, and their ends."""
        self._has_news = False
        """A step with tokens has ended since the last plan."""
        self._stages_free_s = [0.0] * config.pipeline_parallel_size
        """When each can begin another step."""
        self._num_idle_steps = 0
        self.counters = EngineCounters()

    @property
    def changes(self) -> CacheChanges:
        """Changes of its prefix cache."""
        return self._cache.changes

    @property
    def may_start(self) -> bool:
        """Whether a step may be planned: as many are in flight as there are stages at most, and
        none behind one that has found nothing to do, before a result comes."""
        if len(self._steps) == len(self._stages_free_s):
            return False
        last = self._steps[-1][0] if self._steps else None
        return last is None or self._has_news or last.total_num_scheduled_tokens > 0

    @property
    def free_s(self) -> float:
        """When the first stage can begin another step."""
        return self._stages_free_s[0]

    def statistics(self) -> EngineStatistics:
        """The production counters."""
        return self._scheduler.statistics()

    def receive(self, request: TraceRequest) -> None:
        """The scheduler gets it before the next step."""
        self._inbox.append(request)
        self.counters.num_received += 1

    def start_step(self, now_s: float) -> tuple[float | None, list[TraceRequest]]:
        """Drain the inbox and plan a step. Returns the step's end, None if there is nothing to do,
        and the requests that were refused."""
        assert self.may_start
        refused = self._drain() if self._inbox else []
        if not self._scheduler.has_work():
            return None, refused
        plan = self._scheduler.schedule(now=now_s)
        self._has_news = False
        self._follow_rows(plan)
        planned = self._times.planned(plan)
        work = work_of(plan, len(planned.sampled))
        duration_s = self._model.duration_s(work)
        if work.num_tokens:
            self._num_idle_steps = 0
        elif not self._steps:
            duration_s = self._idle(duration_s)
        self._count(work, duration_s)
        end_s = now_s
        for stage, free_s in enumerate(self._stages_free_s):
            end_s = max(end_s, free_s) + duration_s / len(self._stages_free_s)
            self._stages_free_s[stage] = end_s
        self._steps.append((plan, planned, end_s))
        return end_s, refused

    def end_step(self) -> tuple[list[TraceRequest], list[TraceRequest]]:
        """The step's tokens are there. Returns what finished, and what will never run."""
        plan, planned, end_s = self._steps.popleft()
        self._has_news = self._has_news or plan.total_num_scheduled_tokens > 0
        sampled = ModelRunnerOutput(
            req_ids=plan.batch.req_ids, sampled_token_ids=self._times.sampled(planned, end_s)
        )
        outputs = self._scheduler.update_from_output(plan, sampled, now=end_s)
        finished: list[TraceRequest] = []
        refused: list[TraceRequest] = []
        for of_client in outputs.values():
            for output in of_client.other_outputs:
                one = self._live[output.request_id]
                if one.first_token_s is None and output.new_token_ids:
                    one.first_token_s = end_s
                if output.finish_reason is not None:
                    is_finished = self._finish(self._live.pop(output.request_id), end_s)
                    (finished if is_finished else refused).append(one.traced)
        return finished, refused

    # ------------------------------------------------------------------ inside

    def _drain(self) -> list[TraceRequest]:
        refused = []
        for traced in self._inbox:
            request_id = str(traced.index)
            message = EngineRequest(
                request_id=request_id,
                prompt_token_ids=traced.prompt(),  # type: ignore[arg-type]  # 4 bytes a token, not 36
                sampling_params=_sampling_params(traced.num_output_tokens),
                tenant=traced.tenant,
                priority=traced.priority,
            )
            request = Request(message, arrival_time=traced.arrival_s)
            try:
                self._scheduler.add_request(request)
            except QueueFull:
                self._metrics.refuse("queue full")
                refused.append(traced)
            else:
                self._live[request_id] = _Live(traced, request)
        self._inbox.clear()
        return refused

    def _follow_rows(self, plan: SchedulerOutput) -> None:
        """The scheduler assigns rows at admission and frees them at preemption."""
        for request_id in plan.preempted_req_ids:
            if request_id in self._live:
                self._live[request_id].is_running = False
        for new in plan.scheduled_new_reqs:
            one = self._live[new.req_id]
            one.is_running = True
            one.slot = self._times.add_sequence(
                len(new.prompt_token_ids), one.traced.output_token_id
            )
            self._times.assign_row(one.slot, new.row)
        for resumed in plan.resumed_reqs:
            one = self._live[resumed.req_id]
            one.is_running = True
            assert one.slot is not None
            self._times.assign_row(one.slot, resumed.row)

    def _finish(self, one: _Live, now_s: float) -> bool:
        """False if it was refused."""
        # a request and its sequence refer to each other: with many engines they would stay in
        # memory until the garbage collector comes to them
        one.request.sequences.clear()
        longest_gap_s = 0.0 if one.slot is None else self._times.remove_sequence(one.slot)
        if one.first_token_s is None or not one.is_running:
            self._metrics.refuse("can never fit")
            return False
        traced = one.traced
        num_tokens = min(traced.num_output_tokens, self._max_model_len - traced.num_prompt_tokens)
        self._metrics.finish(traced, num_tokens, one.first_token_s, now_s, longest_gap_s)
        return True

    def _idle(self, duration_s: float) -> float:
        """Nothing to compute: outputs to send, copies, or a policy that waits."""
        self._num_idle_steps += 1
        if self._num_idle_steps > _MAX_IDLE_STEPS:
            running, waiting = self._scheduler.get_request_counts()
            raise SimulationError(
                f"{_MAX_IDLE_STEPS} steps in a row computed nothing, with {running} requests "
                f"running and {waiting} waiting; this is a fault of the scheduler, please report it"
            )
        return max(duration_s, _IDLE_STEP_S) if self._num_idle_steps > 1 else duration_s

    def _count(self, work: StepWork, duration_s: float) -> None:
        counters = self.counters
        num_blocks = self._cache.num_blocks_in_use
        counters.block_seconds += num_blocks * duration_s
        counters.peak_blocks = max(counters.peak_blocks, num_blocks)
        if work.num_tokens:
            counters.num_steps += 1
            counters.busy_s += duration_s / len(self._stages_free_s)
            counters.num_step_tokens += work.num_tokens
            counters.num_step_sequences += work.num_sequences


@functools.lru_cache(maxsize=65536)
def _sampling_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRows:
    """Slots of a planned step's sequences, and of those that get a token."""

    slots: npt.NDArray[np.int64]
    sampled: npt.NDArray[np.int64]


class TokenTimes:
    """When the sequences of a batch got their tokens: columns by slot, so that a step costs a few
    numpy operations. A sequence has a slot from its first step to its end, and a row of the
    scheduler's while it runs."""

    def __init__(self, num_rows: int) -> None:
        self._slot_of_row = np.zeros(num_rows, np.int64)
        self._free: list[int] = []
        self._token_ids = np.zeros(0, np.int32)
        """The token that each sequence samples."""
        self._num_prompt_tokens = np.zeros(0, np.int32)
        self._last_token_s = np.zeros(0)
        self._longest_gap_s = np.zeros(0)

    def add_sequence(self, num_prompt_tokens: int, token_id: int) -> int:
        """Returns its slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._token_ids[slot] = token_id
        self._num_prompt_tokens[slot] = num_prompt_tokens
        self._last_token_s[slot] = np.nan
        self._longest_gap_s[slot] = 0.0
        return slot

    def remove_sequence(self, slot: int) -> float:
        """Returns the longest time between two of its tokens."""
        self._free.append(slot)
        return float(self._longest_gap_s[slot])

    def assign_row(self, slot: int, row: int) -> None:
        if row >= len(self._slot_of_row):
            self._slot_of_row = _longer(self._slot_of_row, row + 1)
        self._slot_of_row[row] = slot

    def planned(self, plan: SchedulerOutput) -> PlannedRows:
        """Sequences get a token when all their tokens are computed."""
        batch = plan.batch
        slots = self._slot_of_row[batch.rows]
        stop = batch.num_computed_tokens + batch.num_scheduled_tokens
        needs_sampling = stop == self._num_prompt_tokens[slots] + plan.num_output_tokens
        return PlannedRows(slots, slots if needs_sampling.all() else slots[needs_sampling])

    def sampled(self, planned: PlannedRows, now_s: float) -> Int32Array:
        """The step's tokens are there. Returns one for each sequence of its batch."""
        slots = planned.sampled
        gaps = now_s - self._last_token_s[slots]  # NaN before the first token: fmax ignores it
        self._longest_gap_s[slots] = np.fmax(self._longest_gap_s[slots], gaps)
        self._last_token_s[slots] = now_s
        return self._token_ids[planned.slots]

    def _grow(self) -> None:
        old = len(self._token_ids)
        new = max(64, 2 * old)
        self._free.extend(range(new - 1, old - 1, -1))
        for name in ("_token_ids", "_num_prompt_tokens", "_last_token_s", "_longest_gap_s"):
            setattr(self, name, _longer(getattr(self, name), new))


def _longer(column: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    return np.concatenate([column, np.zeros(length - len(column), column.dtype)])
