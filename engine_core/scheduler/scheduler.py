"""The scheduler: each step lets requests catch up with their tokens. No prefill or decode phase."""

import dataclasses
import enum
from collections import ChainMap
from collections.abc import Callable, Iterable

from engine_core.scheduler.aborts import Aborts
from engine_core.scheduler.batch_state import IdsOfRows
from engine_core.scheduler.batching import MixedBatching
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.errors import DuplicateRequestId
from engine_core.scheduler.in_flight import InFlightStep, InFlightSteps
from engine_core.scheduler.part import SchedulerParts
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.preemption import Preemptor
from engine_core.scheduler.process_outputs import StepOutputProcessor
from engine_core.scheduler.report.explanations import Explanations
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.runner_output import DraftTokenIds, ModelRunnerOutput
from engine_core.scheduler.schedule_waiting import WaitingScheduler
from engine_core.scheduler.stop import check_stop
from engine_core.scheduler.token_budget.feedback import StepFeedback
from protocol.calls import EngineStatistics, RequestInfos
from protocol.errors import PromptTooLong
from protocol.explanations import PreemptionCause, RequestInfo, WaitReason
from protocol.outputs import EngineCoreOutputs


class PauseState(enum.Enum):
    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()
    """No request is started; those that were go on. When they have ended it is PAUSED_ALL."""
    PAUSED_ALL = enum.auto()
    """Plans are empty; requests come, wait, and end by abort or timeout."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Scheduler:
    """Single-threaded: all calls come from the engine's loop.

        scheduler.add_request(request)
        plan = scheduler.schedule()
        outputs = scheduler.update_from_output(plan, runner.execute(plan))

    waiting ──admit──> running ──stop──> finished         schedule: running requests first, then
       ^                  │                               waiting ones, while budget, rows and
       └──── preempt ─────┘                               blocks last; a long prompt is chunked

    `startup/scheduler.py` makes it of its parts. A feature is one of `parts`, which `schedule` and
    `update_from_output` call without knowing what it is."""

    config: SchedulerConfig
    parts: SchedulerParts
    pool: RequestPool
    in_flight_steps: InFlightSteps
    batching: MixedBatching
    waiting: WaitingScheduler
    preemptor: Preemptor
    aborts: Aborts
    output_processor: StepOutputProcessor
    feedback: StepFeedback
    explanations: Explanations

    def __post_init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self._kv_cache = self.pool.kv_cache
        self._sequence_ids = IdsOfRows(self.pool.batch, self.pool.batch.sequence_ids)
        self._pause_why = ""
        self._preempt_all_why: str | None = None

    # ------------------------------------------------------------------ a step

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step. Requests whose `timeout_s` is over end first. Never fails for lack of
        memory: the plan is smaller then. Tokens of steps in flight count as computed; what they
        sample is scheduled too. `now`: seconds, on the clock of the requests' `arrival_time`. Only
        what depends on time (timeouts, prefill delay, ageing, SLOs) needs it. Raises
        StepOrderError: as many steps as may be in flight have not been updated."""
        pool, parts, step_id = self.pool, self.parts, self.in_flight_steps.next_step_id
        self.in_flight_steps.check_may_plan()
        pool.now = now
        for begin_step in parts.begin_step:
            begin_step(step_id, now)
        pool.policy.new_step()
        budget = self.feedback.choose_budget(now)
        if self._kv_cache.has_windows:
            pool.drop_out_of_windows()
        builder = PlanBuilder(pool.batch, token_budget=budget, step_id=step_id, now=now)
        builder.follow_up(pool.drain_preempted_req_ids())
        if self.pause_state is PauseState.PAUSED_ALL:
            self._preempt_paused(builder)
        elif not any(holds_up(builder) for holds_up in parts.holds_up):
            self.batching.fill(builder)
            is_over = builder.is_empty and not self.in_flight and not pool.waits_in_groups
            if is_over and self.pause_state is PauseState.PAUSED_NEW:
                self.pause_state = PauseState.PAUSED_ALL
        for on_filled in parts.on_filled:
            on_filled(builder)
        plan = builder.build(
            self._sequence_ids,
            copies=self._kv_cache.take_copies(),
            finished_req_ids=pool.drain_finished_req_ids(),
            num_lookahead_slots=self.config.num_lookahead_slots,
        )
        for on_plan in parts.on_plan:
            on_plan(plan)
        self.in_flight_steps.add(plan, now)
        if plan.total_num_scheduled_tokens:
            pool.counters.count_step(plan)
        return plan

    def _preempt_paused(self, plan: PlanBuilder) -> None:
        self.explanations.stopped_at(None, WaitReason.PAUSED, self._pause_why)
        why, self._preempt_all_why = self._preempt_all_why, None
        if why is not None:
            self.preemptor.recompute_swapped()
            self.preemptor.recompute_all(plan, PreemptionCause.PAUSED, why)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float = 0.0,
        send: Callable[[dict[int, EngineCoreOutputs]], None] = lambda outputs: None,
    ) -> dict[int, EngineCoreOutputs]:
        """Append what a step sampled, at `now`, in seconds. Returns each client's outputs, by
        client index; terminal outputs of requests that ended otherwise since the last update come
        first. `send` gets them before what only later steps need is done.
        Raises StepOrderError: not the first of the steps in flight."""
        step = self.in_flight_steps.remove(scheduler_output)
        self.pool.now = now
        for sequence_id, why in model_runner_output.failures.items():
            sequence = self.pool.find_sequence(sequence_id)
            if sequence is not None and step.batch.position_of(sequence) is not None:
                is_refused = sequence_id in model_runner_output.refused
                status = (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_REFUSED)[is_refused]
                self.aborts.finish_requests(sequence.request.request_id, status, why)
        decoded = self.output_processor.process(step, model_runner_output, now)
        self.aborts.finish_postponed()
        outputs = self.pool.outputs.drain(scheduler_output.step_id)
        send(outputs)
        self.output_processor.end_answered()
        duration_s = self.feedback.observe(step, decoded, now)
        if model_runner_output.draft_token_ids is not None:
            self.update_draft_token_ids(model_runner_output.draft_token_ids)
        for on_update in self.parts.on_update:
            on_update(step, duration_s)
        return outputs

    def discard_step(self, scheduler_output: SchedulerOutput, detail: str) -> None:
        """The step failed. A fault voids what is behind it: all running requests wait again, with
        the tokens that they have, and the blocks that those steps should have filled leave the
        prefix cache. The requests of this step then run apart from all others, in groups; the one
        that fails alone ends with FINISHED_ERROR and this detail (`fault_isolation.py`). Each
        voided step (`is_discarded`) is still to be updated, in order, with an empty
        ModelRunnerOutput.

        Raises:
            StepOrderError: not the first of the steps in flight.
            DeviceFault: steps fail whatever they hold.
        """
        self.in_flight_steps.check_is_first(scheduler_output)
        steps = self.in_flight
        if steps[0].is_discarded:
            return  # with the step before it
        for on_discard in self.parts.on_discard:
            on_discard(steps, detail)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts to verify in the next step, in place of earlier ones. Dropped for requests that
        are not running, whose prompt is not computed, or whose next token is in flight."""
        for sequence_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            sequence = self.pool.find_sequence(sequence_id)
            if sequence is None or sequence.row is None or sequence.is_prefill:
                continue
            if self.pool.batch.is_in_flight(sequence.row):
                continue  # they follow a token that is no longer its last
            limit = sequence.max_drafts(self.config.max_model_len)
            sequence.spec_token_ids = drafts[: max(0, limit)]

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        """Put a request at the tail of the waiting queue. One that can never fit, or that has all
        its tokens already, ends at once: its terminal output comes with the next update.

        Raises:
            DuplicateRequestId: the id belongs to an unfinished request, which is not affected.
            QueueFull: the waiting queue is at its limit.
            ValueError: the request asks for what this scheduler does not do.
        """
        pool, max_model_len = self.pool, self.config.max_model_len
        if pool.is_taken(request.request_id):
            raise DuplicateRequestId(
                f"request_id {request.request_id!r} belongs to an unfinished request; use another "
                "id, or send it again after that request's last output"
            )
        pool.policy.check(request)
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"{request} has been scheduled before; make a new Request")
        for check_request in self.parts.check_request:
            check_request(request)
        request.first_step_id = self.next_step_id
        pool.add_waiting(request)
        for on_arrival in self.parts.on_arrival:
            on_arrival(request)
        num_prompt, num_generated = request.num_prompt_tokens, int(request.generates)
        if num_prompt + num_generated > max_model_len:
            why = str(PromptTooLong(num_prompt, max_model_len, num_generated=num_generated))
            pool.finish_request(request, RequestStatus.FINISHED_IGNORED, why)
            return
        if request.beam_search is not None:
            request.beam_search.limit_tokens(max_model_len - num_prompt)
        first = request.sequences[0]
        if request.num_output_tokens and check_stop(first, max_model_len):
            pool.emit_output(first, [])
        elif (reason := self.waiting.why_never(request)) is not None:
            pool.finish_request(request, RequestStatus.FINISHED_IGNORED, reason)

    def finish_requests(
        self, ids: str | Iterable[str], finished_status: RequestStatus, detail: str | None = None
    ) -> None:
        """End requests at once; ids that are unknown or finished are ignored. The terminal outputs
        come with the next update. Raises ValueError: `finished_status` is not a final one."""
        self.aborts.finish_requests(ids, finished_status, detail)

    def finish_sample(self, request_id: str, index: int, finished_status: RequestStatus) -> None:
        """End one sample of a request; the others go on. At once, or if it does not exist yet or
        the others are to fork from it, once they have. Unknown and finished ones and beams are
        ignored."""
        self.aborts.finish_sample(request_id, index, finished_status)

    # ------------------------------------------------------------------ numbers

    @property
    def max_steps_in_flight(self) -> int:
        """Most steps planned and not updated."""
        return self.in_flight_steps.max_steps_in_flight

    @property
    def in_flight(self) -> list[InFlightStep]:
        """Steps planned and not updated, in order."""
        return self.in_flight_steps.steps

    @property
    def next_step_id(self) -> int:
        """The number of the next plan."""
        return self.in_flight_steps.next_step_id

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting); preempted requests wait."""
        return len(self.pool.running), self.pool.num_waiting

    def has_work(self) -> bool:
        """Whether a request is unfinished or a terminal output has not been handed out. Steps in
        flight whose requests have all ended do not count, and are still to be updated."""
        return bool(self.pool.by_id) or self.pool.outputs.has_terminal

    def may_progress(self) -> bool:
        """`has_work`, less requests that wait for the end of a pause."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return self.pool.outputs.has_terminal
        return self.has_work() or self._kv_cache.has_blocks_to_save

    def set_pause_state(self, state: PauseState, why: str = "") -> None:
        """`why` is for explanations."""
        self.pause_state, self._pause_why = state, why
        self.waiting.starts_no_new = state is PauseState.PAUSED_NEW

    def preempt_all(self, why: str) -> None:
        """The next plan, of a paused scheduler, preempts every running request to be recomputed,
        swapped ones with them; after it no sequence holds blocks."""
        self._preempt_all_why = why

    def forget_runner(self) -> None:
        """Called after the plan of `preempt_all`: the next runner knows no request, and its cache
        is empty."""
        self._kv_cache.evict_cached()
        self._begin_new_runner()

    def use_weights(self, name: str, version: int) -> None:
        """Called after the plan of `preempt_all`: a runner of other weights follows, which has this
        cache and knows no request. Blocks of those before are not found under this name;
        outputs carry the version."""
        self._kv_cache.use_weights(name, self._begin_new_runner())
        self.pool.outputs.weights_version = version

    def _begin_new_runner(self) -> list[Sequence]:
        """Returns all unfinished sequences."""
        for on_new_runner in self.parts.on_new_runner:
            on_new_runner()
        unfinished = [seq for request in self.pool.by_id.values() for seq in request.unfinished]
        for sequence in unfinished:
            sequence.is_known_to_runner = False
        return unfinished

    def requests_with_adapter(self, adapter: str) -> list[str]:
        """Ids of the adapter's unfinished requests."""
        return [name for name, each in self.pool.by_id.items() if each.adapter == adapter]

    def explain(self, request_id: str) -> RequestInfo | None:
        """Why a request is where it is; None if it is unknown, or finished long ago."""
        return self.explanations.explain(request_id)

    def explain_all(self, tenant: str | None) -> RequestInfos:
        """Why each unfinished request is where it is; only those of `tenant`, if given."""
        return self.explanations.explain_all(tenant)

    def reset_prefix_cache(self) -> int:
        """Drop every cached block that no request holds. Returns how many."""
        return self._kv_cache.reset_prefix_cache()

    def statistics(self) -> EngineStatistics:
        """The numbers of this moment; those of the engine around the scheduler are 0."""
        numbers = ChainMap(*[dict(each()) for each in self.parts.statistics])
        return EngineStatistics(
            **numbers, uptime_s=0.0, num_clients=0, step_time_s=0.0, model_time_s=0.0
        )

    def check(self) -> None:
        """Assert that steps, queues, rows, counters and the cache agree with each other."""
        self.in_flight_steps.check()
        for check in self.parts.check:
            check()
