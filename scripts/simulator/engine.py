"""One engine in virtual time: the production scheduler and cache, and a step model for the runner.

    drain the inbox -> schedule(now) -> the step lasts model(plan) -> update_from_output(its end)

Tokens appear at the end of their step; what arrives meanwhile waits in the inbox, as in the daemon.
Knows no other engines and no trace files. What grows with the batch is numpy over columns.
"""

import dataclasses
import functools

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import Request, Scheduler, SchedulerConfig, SchedulerStatistics
from engine_core.scheduler.errors import QueueFull
from engine_core.scheduler.plan import ModelRunnerOutput, SchedulerOutput
from protocol.outputs import EngineCoreOutput
from protocol.sampling import SamplingParams
from scripts.simulator.errors import SimulationError
from scripts.simulator.request_metrics import RequestMetrics
from scripts.simulator.row_times import RowTimes
from scripts.simulator.shared_text import shared_block_hashes
from scripts.simulator.step_work import StepModel, StepWork, work_of
from scripts.simulator.timeline import Timeline
from scripts.simulator.trace import TraceRequest

_MAX_IDLE_STEPS = 10_000
_IDLE_STEP_S = 1e-3
"""How long a step lasts that computes nothing, if the model says 0: time must go on."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSize:
    num_blocks: int
    block_size: int = 16
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0

    def make(self) -> KVCacheManager:
        return KVCacheManager(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            watermark=self.watermark,
            enable_prefix_caching=self.enable_prefix_caching,
            num_host_blocks=self.num_host_blocks,
        )


@dataclasses.dataclass(slots=True)
class EngineCounters:
    """Of one engine, over the whole run."""

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
    row: int = -1
    first_token_s: float | None = None


@dataclasses.dataclass(slots=True)
class _OpenStep:
    plan: SchedulerOutput
    work: StepWork
    end_s: float


class SimulatedEngine:
    """
    Args:
        cache: this engine's own.
        metrics, timeline: may be shared by engines.

    Raises:
        SimulationError, ValueError: a limit of scheduler or cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        model: StepModel,
        metrics: RequestMetrics,
        timeline: Timeline | None = None,
    ) -> None:
        self._cache = cache
        self._scheduler = Scheduler(config, self._cache)
        self._max_model_len = config.max_model_len
        self._model = model
        self._metrics = metrics
        self._timeline = timeline
        self._inbox: list[TraceRequest] = []
        self._live: dict[str, _Live] = {}
        self._rows = RowTimes(config.max_num_seqs)
        self._open: _OpenStep | None = None
        self._num_idle_steps = 0
        self.counters = EngineCounters()

    @property
    def is_stepping(self) -> bool:
        return self._open is not None

    def statistics(self) -> SchedulerStatistics:
        """The production counters."""
        return self._scheduler.statistics()

    def receive(self, request: TraceRequest) -> None:
        """It arrived; the scheduler sees it before the next step."""
        self._inbox.append(request)
        self.counters.num_received += 1

    def start_step(self, now_s: float) -> tuple[float | None, list[TraceRequest]]:
        """Take the inbox and plan a step. Returns the step's end, None if there is nothing to do,
        and the requests that were refused."""
        assert self._open is None
        refused = self._drain() if self._inbox else []
        scheduler = self._scheduler
        if not scheduler.has_work():
            return None, refused
        plan = scheduler.schedule(now=now_s)
        self._follow_rows(plan)
        batch = plan.batch
        sampled = self._rows.planned(batch, plan.num_output_tokens)
        work = work_of(plan, sampled)
        duration_s = self._model.duration_s(work)
        if work.num_tokens:
            self._num_idle_steps = 0
        else:
            duration_s = self._idle(duration_s)
        self._count(work, now_s, duration_s)
        end_s = now_s + duration_s
        self._open = _OpenStep(plan, work, end_s)
        return end_s, refused

    def end_step(self) -> tuple[list[TraceRequest], list[TraceRequest]]:
        """The step's tokens are there. Returns what finished, and what will never run."""
        step = self._open
        assert step is not None
        self._open = None
        batch = step.plan.batch
        token_ids = self._rows.sampled(step.end_s)
        outputs = self._scheduler.update_from_output(
            step.plan,
            ModelRunnerOutput(req_ids=batch.req_ids, sampled_token_ids=token_ids),
            now=step.end_s,
        )
        finished: list[TraceRequest] = []
        refused: list[TraceRequest] = []
        for of_client in outputs.values():
            for output in of_client.other_outputs:
                self._take(output, step.end_s, finished, refused)
        return finished, refused

    # ------------------------------------------------------------------ inside

    def _drain(self) -> list[TraceRequest]:
        refused = []
        for traced in self._inbox:
            request_id = str(traced.index)
            request = Request(
                request_id=request_id,
                prompt_token_ids=traced.prompt(),
                sampling_params=_sampling_params(traced.num_output_tokens),
                arrival_time=traced.arrival_s,
                tenant=traced.tenant,
                priority=traced.priority,
            )
            request.block_hashes.extend(shared_block_hashes(traced, self._cache.block_size))
            try:
                self._scheduler.add_request(request)
            except QueueFull:
                self._metrics.was_refused("queue full")
                refused.append(traced)
            else:
                self._live[request_id] = _Live(traced, request)
        self._inbox.clear()
        return refused

    def _follow_rows(self, plan: SchedulerOutput) -> None:
        """Rows are given away at admission and taken at preemption."""
        live, rows = self._live, self._rows
        for request_id in plan.preempted_req_ids:
            one = live.get(request_id)
            if one is not None and one.row >= 0:
                rows.park(request_id, one.row)
                one.row = -1
        for data in plan.scheduled_new_reqs:
            traced = live[data.req_id].traced
            rows.give(data.row, len(data.prompt_token_ids), traced.output_token_id)
            live[data.req_id].row = data.row
        for again in plan.resumed_reqs:
            rows.give_back(again.req_id, again.row)
            live[again.req_id].row = again.row

    def _take(
        self,
        output: EngineCoreOutput,
        now_s: float,
        finished: list[TraceRequest],
        refused: list[TraceRequest],
    ) -> None:
        one = self._live[output.request_id]
        if one.first_token_s is None and output.new_token_ids:
            one.first_token_s = now_s
        if output.finish_reason is None:
            return
        del self._live[output.request_id]
        # a request and its sequence hold each other: with many engines a request that is over
        # would stay for a long time, until the garbage collector comes to it
        one.request.sequences.clear()
        traced = one.traced
        if one.first_token_s is None or one.row < 0:
            self._rows.forget(output.request_id)
            self._metrics.was_refused("can never fit")
            refused.append(traced)
            return
        self._metrics.finished(
            arrival_s=traced.arrival_s,
            first_token_s=one.first_token_s,
            finished_s=now_s,
            longest_gap_s=float(self._rows.longest_gap_s[one.row]),
            num_prompt_tokens=traced.num_prompt_tokens,
            num_output_tokens=min(
                traced.num_output_tokens, self._max_model_len - traced.num_prompt_tokens
            ),
        )
        finished.append(traced)

    def _idle(self, duration_s: float) -> float:
        """Nothing to compute: outputs to hand out, copies, or a policy that waits."""
        self._num_idle_steps += 1
        if self._num_idle_steps > _MAX_IDLE_STEPS:
            running, waiting = self._scheduler.get_request_counts()
            raise SimulationError(
                f"{_MAX_IDLE_STEPS} steps in a row computed nothing, with {running} requests "
                f"running and {waiting} waiting; this is a fault of the scheduler, please report it"
            )
        return max(duration_s, _IDLE_STEP_S) if self._num_idle_steps > 1 else duration_s

    def _count(self, work: StepWork, now_s: float, duration_s: float) -> None:
        counters = self.counters
        num_blocks = self._cache.num_blocks_in_use
        counters.block_seconds += num_blocks * duration_s
        counters.peak_blocks = max(counters.peak_blocks, num_blocks)
        if work.num_tokens:
            counters.num_steps += 1
            counters.busy_s += duration_s
            counters.num_step_tokens += work.num_tokens
            counters.num_step_sequences += work.num_sequences
        if self._timeline is not None:
            running, waiting = self._scheduler.get_request_counts()
            num_decodes = self._rows.num_decodes()
            self._timeline.add(
                now_s,
                duration_s,
                (work.num_tokens - num_decodes, num_decodes, num_blocks, running, waiting, 1),
            )


@functools.lru_cache(maxsize=65536)
def _sampling_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
