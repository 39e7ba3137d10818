"""Who runs in the next step, without phases: each step lets requests catch up with their tokens.

Owns the turn of steps, and ties the parts together. Must not know tensors, sockets, clocks or text.

    waiting ──admit──> running ──stop──> finished         schedule: the composition orders turns;
       ^                  │                               by default running requests first, then
       └──── preempt ─────┘                               waiting ones, while budget, rows and
                                                          blocks last; a prompt too long is chunked
    policies/      who is next, who gives way             compositions/  what a step is made of
    preemption.py  how a request comes back               step_budget.py how many tokens a step has
"""

from collections.abc import Iterable

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.batching import make_batching
from engine_core.scheduler.batching.turns import assemble_turns
from engine_core.scheduler.block_needs import why_never
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.errors import DuplicateRequestId
from engine_core.scheduler.explanations import Explanations
from engine_core.scheduler.faults import Faults
from engine_core.scheduler.forking import SequenceForks
from engine_core.scheduler.in_flight import InFlightStep, InFlightSteps
from engine_core.scheduler.interface import SchedulerInterface
from engine_core.scheduler.invariants import check_live
from engine_core.scheduler.limits import QueueLimits
from engine_core.scheduler.plan import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.policies import make_policy
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import PreemptionRule, make_preemption_rule
from engine_core.scheduler.process_outputs import ModelOutputProcessor
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_checks import prompt_too_long
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence_names import SequenceNames
from engine_core.scheduler.statistics import SchedulerStatistics, collect_statistics
from engine_core.scheduler.stop import check_stop
from engine_core.scheduler.token_budget.base import TokenBudget
from engine_core.scheduler.token_budget.feedback import StepFeedback
from engine_core.scheduler.token_budget.slo import make_token_budget
from protocol.explanations import RequestInfo
from protocol.outputs import EngineCoreOutputs


class Scheduler(SchedulerInterface):
    """
    Args:
        config: its settings, checked.
        kv_cache: the blocks; this scheduler alone may change it.
        policy, preemption_rule, token_budget: instead of those that the config names.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        policy: SchedulingPolicy | None = None,
        preemption_rule: PreemptionRule | None = None,
        token_budget: TokenBudget | None = None,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._policy = policy = policy or make_policy(config)
        preemption_rule = preemption_rule or make_preemption_rule(config, kv_cache.block_size)
        self._batching = make_batching(config)
        self._max_model_len = config.max_model_len
        self._queue_limits = QueueLimits(config.max_queued_requests, config.max_queued_tokens)
        rows = BatchState(config.max_num_seqs, config.max_model_len)
        self._explanations = Explanations()
        self._live = live = RequestPool(
            kv_cache,
            policy,
            rows,
            max_model_len=config.max_model_len,
            on_leave=self._explanations.finished,
        )
        self._turns = assemble_turns(
            live, kv_cache, policy, preemption_rule, self._explanations, config
        )
        self._steps = InFlightSteps(rows, config.max_steps_in_flight)
        self._faults = Faults(live, kv_cache, self._steps, self._turns.preemptor)
        self._names = SequenceNames(rows)
        self._intake = ModelOutputProcessor(
            live, SequenceForks(live, kv_cache), max_model_len=config.max_model_len
        )
        self._learning = StepFeedback(
            live, policy, preemption_rule, token_budget or make_token_budget(config)
        )

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        live = self._live
        if live.is_taken(request.request_id):
            raise DuplicateRequestId(request.request_id)
        self._policy.check(request)
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"{request} has been scheduled before; make a new Request")
        try:
            self._queue_limits.check(live, request)
        except Exception:
            live.counters.num_refused += 1
            raise
        request.first_step_id = self._steps.next_step_id
        live.add(request)
        if request.num_prompt_tokens >= self._max_model_len:
            why = prompt_too_long(request.num_prompt_tokens, self._max_model_len)
            live.end(request, RequestStatus.FINISHED_IGNORED, why)
            return
        request.limit_beams(self._max_model_len)
        first = request.sequences[0]
        if request.num_output_tokens and check_stop(first, self._max_model_len):
            live.tell(first, [])
        elif (reason := why_never(request, self._kv_cache, self._config)) is not None:
            live.end(request, RequestStatus.FINISHED_IGNORED, reason)

    def finish_requests(
        self,
        ids: str | Iterable[str],
        finished_status: RequestStatus,
        detail: str | None = None,
    ) -> None:
        if not finished_status.is_finished:
            raise ValueError(
                f"finished_status is {finished_status.name}, it must be one of "
                f"{[status.name for status in RequestStatus if status.is_finished]}"
            )
        for request_id in [ids] if isinstance(ids, str) else list(ids):
            request = self._live.by_id.get(request_id)
            if request is not None:
                is_fault = finished_status is RequestStatus.FINISHED_ERROR
                self._faults.forget_what_is_not_computed(request, everything=is_fault)
                self._live.end(request, finished_status, detail)

    # ------------------------------------------------------------------ a step

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        live = self._live
        self._steps.check_may_plan()
        self._policy.new_step(now)
        step_id = self._steps.next_step_id
        self._explanations.new_step(step_id)
        plan = PlanBuilder(
            live.rows, token_budget=self._learning.choose_budget(now), step_id=step_id, now=now
        )
        self._batching.fill(plan, self._turns)
        scheduler_output = plan.build(
            self._names,
            copies=self._kv_cache.take_copies(),
            num_common_prefix_blocks=self._num_common_prefix_blocks(),
            finished_req_ids=live.take_finished_req_ids(),
            num_lookahead_slots=self._config.num_lookahead_slots,
        )
        self._steps.planned(scheduler_output, now)
        live.counters.num_steps += scheduler_output.total_num_scheduled_tokens > 0
        return scheduler_output

    def _num_common_prefix_blocks(self) -> list[int]:
        rows = self._live.rows
        order = rows.order
        first = rows.sequences[order[0]] if len(order) else None
        return self._kv_cache.num_common_prefix_blocks(first, len(order))

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float = 0.0,
    ) -> dict[int, EngineCoreOutputs]:
        step = self._steps.updated(scheduler_output)
        for name, why in model_runner_output.failures.items():
            sequence = self._live.find_sequence(name)
            if sequence is not None and step.position_of(sequence) is not None:
                request_id = sequence.request.request_id
                self.finish_requests(request_id, RequestStatus.FINISHED_ERROR, why)
        decoded = self._intake.take(step, model_runner_output, now)
        self._learning.observe(step, decoded, now)
        if model_runner_output.draft_token_ids is not None:
            self.update_draft_token_ids(model_runner_output.draft_token_ids)
        return self._live.outputs.take(scheduler_output.step_id)

    def discard_step(self, scheduler_output: SchedulerOutput, detail: str) -> None:
        self._steps.check_open(scheduler_output)
        steps = self._steps.open
        for step in steps:
            step.is_discarded = True
        self._faults.discard(steps, detail)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        for name, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            sequence = self._live.find_sequence(name)
            if sequence is None or sequence.row is None or sequence.is_prefill:
                continue
            if self._live.rows.is_in_flight(sequence.row):
                continue  # they are behind a token that is no longer its last
            # one token comes behind the drafts in any case
            params = sequence.request.sampling_params
            limit = min(
                params.max_tokens - sequence.num_output_tokens - 1,
                self._max_model_len - sequence.num_tokens - 1,
            )
            sequence.spec_token_ids = drafts[: max(0, limit)]

    # ------------------------------------------------------------------ numbers

    @property
    def max_steps_in_flight(self) -> int:
        return self._steps.max_steps_in_flight

    @property
    def in_flight(self) -> list[InFlightStep]:
        """Steps that were planned and not updated, in order."""
        return self._steps.open

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._live.running), len(self._live.waiting)

    def has_work(self) -> bool:
        return bool(self._live.by_id) or self._live.outputs.has_terminal

    def explain(self, request_id: str) -> RequestInfo | None:
        request = self._live.by_id.get(request_id)
        if request is None:
            return self._explanations.of_finished(request_id)
        return self._explanations.of_live(request, self._live.waiting)

    def reset_prefix_cache(self) -> int:
        return self._kv_cache.reset_prefix_cache()

    def statistics(self) -> SchedulerStatistics:
        return collect_statistics(self._live, self._kv_cache, self._policy, self._learning.now)

    def check(self) -> None:
        """Assert that steps, queues, rows, counters and the cache agree with each other."""
        self._steps.check()
        check_live(self._live, self._kv_cache, self._config.max_num_seqs)
