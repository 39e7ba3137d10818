"""The scheduler: each step lets requests catch up with their tokens. No prefill or decode phase."""

import enum
import itertools
from collections.abc import Callable, Iterable

from engine_core.kv_cache import KVCacheManager, Transfers
from engine_core.scheduler.batch_state import BatchState, IdsOfRows
from engine_core.scheduler.batching import MixedBatching, PrefillFirstBatching
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.constraints import Constraints
from engine_core.scheduler.errors import DuplicateRequestId, QueueFull
from engine_core.scheduler.in_flight import InFlightStep, InFlightSteps
from engine_core.scheduler.plan import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.policies import make_policy
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import (
    PreemptionMode,
    PreemptionRule,
    Preemptor,
    make_preemption_rule,
)
from engine_core.scheduler.process_outputs import StepOutputProcessor
from engine_core.scheduler.report.explanations import Explanations
from engine_core.scheduler.report.statistics import check_pool, collect_statistics
from engine_core.scheduler.report.view import scheduler_view
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.rules.adapters import AdapterSlots
from engine_core.scheduler.rules.constrained_steps import ConstrainedSteps
from engine_core.scheduler.rules.deadlines import Deadlines
from engine_core.scheduler.rules.encoder_inputs import EncoderInputRule
from engine_core.scheduler.rules.fault_isolation import PROBE_CLIENT, FaultIsolation
from engine_core.scheduler.rules.micro_batches import MicroBatches
from engine_core.scheduler.schedule_waiting import WaitingScheduler
from engine_core.scheduler.speculation.base import Proposer
from engine_core.scheduler.speculation.speculator import Speculator
from engine_core.scheduler.stop import check_stop
from engine_core.scheduler.token_budget.attainment import SLOAttainment
from engine_core.scheduler.token_budget.base import TokenBudget
from engine_core.scheduler.token_budget.feedback import StepFeedback
from engine_core.scheduler.token_budget.slo import make_token_budget
from protocol.calls import EngineStatistics, RequestInfos
from protocol.errors import PromptTooLong
from protocol.explanations import PreemptionCause, RequestInfo, WaitReason
from protocol.outputs import EngineCoreOutputs
from protocol.snapshots import SchedulerView


class PauseState(enum.Enum):
    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()
    """No request is started; those that were go on. When they have ended it is PAUSED_ALL."""
    PAUSED_ALL = enum.auto()
    """Plans are empty; requests come, wait, and end by abort or timeout."""


class Scheduler:
    """Single-threaded: all calls come from the engine's loop.

        scheduler.add_request(request)
        plan = scheduler.schedule()
        outputs = scheduler.update_from_output(plan, runner.execute(plan))

    waiting ──admit──> running ──stop──> finished         schedule: running requests first, then
       ^                  │                               waiting ones, while budget, rows and
       └──── preempt ─────┘                               blocks last; a long prompt is chunked

    Args:
        config: its settings.
        kv_cache: the blocks; this scheduler alone may change it.
        policy, preemption_rule, token_budget: instead of those that the config names.
        proposer: of drafts; None: the runner makes them, if there are any.
        draft_method: by which they are counted.
        constraints: what structured outputs are made with; None: there are none.
        transfers: of blocks from other engines; None: there are none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        policy: SchedulingPolicy | None = None,
        preemption_rule: PreemptionRule | None = None,
        token_budget: TokenBudget | None = None,
        proposer: Proposer | None = None,
        draft_method: str = "draft",
        constraints: Constraints | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        if config.num_speculative_tokens and not kv_cache.goes_back:
            raise ValueError(
                "drafts that are rejected go back, and layers of this model keep a state that "
                "cannot; omit --speculative and --draft-model"
            )
        self._config = config
        self._kv_cache = kv_cache
        self._policy = policy = policy or make_policy(config)
        rule = preemption_rule or make_preemption_rule(config, kv_cache.block_size)
        budget = token_budget or make_token_budget(config)
        batch = BatchState(config.max_num_seqs, config.max_model_len)
        self._sequence_ids = IdsOfRows(batch, batch.sequence_ids)
        self._explanations = Explanations()
        self._pool = pool = RequestPool(
            kv_cache, policy, batch, max_model_len=config.max_model_len, on_finish=self._on_finish
        )
        self._preemptor = preemptor = Preemptor(pool, rule)
        self.pause_state = PauseState.UNPAUSED
        self.adapters = AdapterSlots(config.max_num_adapters, loads=config.loads_adapters)
        """Which adapters have a slot, and what is to be loaded."""
        self._encoder = EncoderInputRule(pool, self._explanations, config)
        self._waiting = WaitingScheduler(
            pool, self._explanations, config, self.adapters, self._encoder, transfers
        )
        self._in_flight = InFlightSteps(
            pool, config.max_steps_in_flight, is_pipeline=config.pipeline_parallel_size > 1
        )
        micro_batches = MicroBatches(pool, self._in_flight, config)
        batching = MixedBatching if config.batching == "mixed" else PrefillFirstBatching
        self._batching = batching(
            pool, preemptor, self._waiting, self._explanations, config, micro_batches
        )
        self._isolation = FaultIsolation(pool, preemptor)
        self._speculator: Speculator | None = None
        if config.num_speculative_tokens:
            self._speculator = Speculator(pool, config, proposer)
        self._output_processor = StepOutputProcessor(
            pool, config.max_model_len, self._speculator, draft_method
        )
        self._feedback = StepFeedback(pool, rule, budget, micro_batches)
        self._constrained: ConstrainedSteps | None = None
        if constraints is not None:
            self._constrained = ConstrainedSteps(pool, constraints, config)
        self._deadlines = Deadlines()
        self._slo = SLOAttainment(config, pool.counters)
        self._pause_why = ""
        self._preempt_all_why: str | None = None
        self._samples_to_finish: dict[tuple[str, int], RequestStatus] = {}

    # ------------------------------------------------------------------ a step

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step. Requests whose `timeout_s` is over end first. Never fails for lack of
        memory: the plan is smaller then. Tokens of steps in flight count as computed; what they
        sample is scheduled too. `now`: seconds, on the clock of the requests' `arrival_time`. Only
        what depends on time (timeouts, prefill delay, ageing, SLOs) needs it. Raises
        StepOrderError: as many steps as may be in flight have not been updated."""
        self._in_flight.check_may_plan()
        self._end_expired(now)
        if self._constrained is not None:
            self._constrained.take_compiled()
        self._policy.new_step()
        step_id = self._in_flight.next_step_id
        self._explanations.new_step(step_id)
        self._encoder.new_step()
        budget = self._feedback.choose_budget(now)
        if self._kv_cache.has_windows:
            self._pool.drop_out_of_windows()
        plan = PlanBuilder(self._pool.batch, token_budget=budget, step_id=step_id, now=now)
        plan.follow_up(self._pool.drain_preempted_req_ids())
        if self.pause_state is PauseState.PAUSED_ALL:
            self._fill_paused(plan)
        elif not self._isolates(plan):
            self._batching.fill(plan)
            is_over = plan.is_empty and not self._in_flight.steps and not self._isolation.is_active
            if is_over and self.pause_state is PauseState.PAUSED_NEW:
                self.pause_state = PauseState.PAUSED_ALL
        speculator = self._speculator
        encoder_inputs, freed_encoder_outputs = self._encoder.take_scheduled()
        scheduler_output = plan.build(
            self._sequence_ids,
            copies=self._kv_cache.take_copies(),
            finished_req_ids=self._pool.drain_finished_req_ids(),
            num_lookahead_slots=self._config.num_lookahead_slots,
            num_drafts_wanted=None if speculator is None else speculator.num_wanted(plan),
            scheduled_encoder_inputs=encoder_inputs,
            free_encoder_mm_hashes=freed_encoder_outputs,
        )
        if self._constrained is not None:
            scheduler_output = self._constrained.with_masks(scheduler_output)
        self._in_flight.add(scheduler_output, now)
        if scheduler_output.total_num_scheduled_tokens:
            self._pool.counters.count_step(scheduler_output)
        return scheduler_output

    def _fill_paused(self, plan: PlanBuilder) -> None:
        why, self._preempt_all_why = self._preempt_all_why, None
        if why is not None:
            self._preemptor.recompute_swapped()
            for request in reversed(list(self._pool.running.values())):
                self._preemptor.preempt(
                    request, plan, PreemptionCause.PAUSED, why, PreemptionMode.RECOMPUTE
                )
        self._explanations.stopped_at(None, WaitReason.PAUSED, self._pause_why)

    def _unfinished_sequences(self) -> list[Sequence]:
        return [
            sequence for request in self._pool.by_id.values() for sequence in request.unfinished
        ]

    def _isolates(self, plan: PlanBuilder) -> bool:
        """Whether a failed step's requests run in groups, and one of these is in flight: one step
        at a time, so that it is clear which of them fails."""
        if self._isolation.is_active and not self._in_flight.steps:
            self._isolation.advance(plan)
        if not self._isolation.is_active:
            return False
        why = "a step failed; its requests run in groups until the one that makes it fail is found"
        self._explanations.stopped_at(None, WaitReason.ALONE, why)
        return bool(self._in_flight.steps)

    def _end_expired(self, now: float) -> None:
        for request in self._deadlines.take_expired(now):
            num_tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
            self.finish_requests(
                request.request_id,
                RequestStatus.FINISHED_TIMEOUT,
                f"timeout_s is {request.message.timeout_s:.6g}, and the request arrived "
                f"{now - request.arrival_time:.3f} s ago and has {num_tokens} tokens; raise "
                "timeout_s, ask for fewer tokens, or try again when fewer requests wait",
            )

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
        step = self._in_flight.remove(scheduler_output)
        self._feedback.now = now
        for sequence_id, why in model_runner_output.failures.items():
            sequence = self._pool.find_sequence(sequence_id)
            if sequence is not None and step.batch.position_of(sequence) is not None:
                request_id = sequence.request.request_id
                is_refused = sequence_id in model_runner_output.refused
                status = (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_REFUSED)[is_refused]
                self.finish_requests(request_id, status, why)
        decoded = self._output_processor.process(step, model_runner_output, now)
        to_finish, self._samples_to_finish = self._samples_to_finish, {}
        for (request_id, index), status in to_finish.items():
            self.finish_sample(request_id, index, status)
        outputs = self._pool.outputs.drain(scheduler_output.step_id)
        outputs.pop(PROBE_CLIENT, None)
        send(outputs)
        self._output_processor.end_answered()
        duration_s = self._feedback.observe(step, decoded, now)
        if model_runner_output.draft_token_ids is not None:
            self.update_draft_token_ids(model_runner_output.draft_token_ids)
        if self._speculator is not None:
            self._speculator.observe_time(step, duration_s)
            self._speculator.propose()
        if self._constrained is not None:
            self._constrained.draft_forced(step)
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
        self._in_flight.check_is_first(scheduler_output)
        steps = self._in_flight.steps
        if steps[0].is_discarded:
            return  # with the step before it
        self._isolation.begin(scheduler_output, detail)
        # Blocks may be wrong that no step was to compute: which copies were made is not known, and
        # blocks that the first step was to fill may have been freed, found and copied by others.
        is_unclear = len(steps) > 1 or not steps[0].plan.copies.is_empty
        requests: dict[str, Request] = {}
        for step in steps:
            step.is_discarded = True
            self._pool.tell_again(step.plan)
            requests |= self._running_requests_of(step.plan)
        for request in requests.values():
            self._drop_uncomputed(request, everything=is_unclear)
        self._isolation.close_group()
        self._preemptor.recompute_running(scheduler_output.step_id, detail)
        if is_unclear:
            self._kv_cache.evict_cached()
        self._encoder.discard(name for step in steps for name in step.plan.free_encoder_mm_hashes)

    def _running_requests_of(self, plan: SchedulerOutput) -> dict[str, Request]:
        """Those that the step computes or that came back with it."""
        names = [*plan.batch.req_ids, *(resumed.req_id for resumed in plan.resumed_reqs)]
        sequences = map(self._pool.find_sequence, names)
        running = (seq for seq in sequences if seq is not None and seq.row is not None)
        return {seq.request.request_id: seq.request for seq in running}

    def _drop_uncomputed(self, request: Request, *, everything: bool) -> None:
        """A step without a result may not have filled its blocks. `everything`: any block of the
        request may be wrong."""
        for sequence in request.unfinished:
            num_in_flight = self._in_flight.num_tokens_in_flight(sequence)
            first_wrong = 0 if everything else sequence.num_computed_tokens - num_in_flight
            self._drop_computed_from(sequence, first_wrong)

    def _drop_computed_from(self, sequence: Sequence, first_wrong: int) -> None:
        if first_wrong < sequence.num_computed_tokens:
            self._kv_cache.invalidate(sequence, first_wrong)
            sequence.num_computed_tokens = first_wrong

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts to verify in the next step, in place of earlier ones. Dropped for requests that
        are not running, whose prompt is not computed, or whose next token is in flight."""
        for sequence_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            sequence = self._pool.find_sequence(sequence_id)
            if sequence is None or sequence.row is None or sequence.is_prefill:
                continue
            if self._pool.batch.is_in_flight(sequence.row):
                continue  # they follow a token that is no longer its last
            limit = sequence.max_drafts(self._config.max_model_len)
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
        pool, max_model_len = self._pool, self._config.max_model_len
        if pool.is_taken(request.request_id):
            raise DuplicateRequestId(
                f"request_id {request.request_id!r} belongs to an unfinished request; use another "
                "id, or send it again after that request's last output"
            )
        self._policy.check(request)
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"{request} has been scheduled before; make a new Request")
        self._encoder.check_request(request)
        self._check_queue(request)
        request.first_step_id = self._in_flight.next_step_id
        pool.add_waiting(request)
        self._deadlines.add(request)
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
        elif (reason := self._waiting.why_never(request)) is not None:
            pool.finish_request(request, RequestStatus.FINISHED_IGNORED, reason)

    def _on_finish(self, request: Request, detail: str | None) -> None:
        self._explanations.finished(request, detail)
        if self._speculator is not None:
            self._speculator.learn(request)
        self._slo.count(request, self._feedback.now)

    def _check_queue(self, request: Request) -> None:
        """Preempted and resumed requests count, and are never refused. An empty queue takes any
        request."""
        if request.message.is_resumed:
            return
        pool = self._pool
        num_requests, num_tokens = self.get_request_counts()[1], pool.num_queued_tokens
        max_requests, max_tokens = self._config.max_queued_requests, self._config.max_queued_tokens
        if (max_requests is not None and num_requests >= max_requests) or (
            max_tokens is not None
            and num_requests > 0
            and num_tokens + request.num_tokens > max_tokens
        ):
            pool.counters.num_refused += 1
            limits = [
                f"{limit} {what} (--max-queued-{what})"
                for limit, what in ((max_requests, "requests"), (max_tokens, "tokens"))
                if limit is not None
            ]
            raise QueueFull(
                f"the queue is full: {num_requests} requests of {num_tokens} tokens wait and "
                f"{len(pool.running)} run, the limit is {' and '.join(limits)}; try again later"
            )

    def finish_requests(
        self, ids: str | Iterable[str], finished_status: RequestStatus, detail: str | None = None
    ) -> None:
        """End requests at once; ids that are unknown or finished are ignored. The terminal outputs
        come with the next update. Raises ValueError: `finished_status` is not a final one."""
        if not finished_status.is_finished:
            raise ValueError(
                f"finished_status is {finished_status.name}, it must be one of "
                f"{[status.name for status in RequestStatus if status.is_finished]}"
            )
        for request_id in [ids] if isinstance(ids, str) else list(ids):
            request = self._pool.by_id.get(request_id)
            if request is not None:
                is_fault = finished_status is RequestStatus.FINISHED_ERROR
                self._drop_uncomputed(request, everything=is_fault)
                self._pool.finish_request(request, finished_status, detail)

    def finish_sample(self, request_id: str, index: int, finished_status: RequestStatus) -> None:
        """End one sample of a request; the others go on. At once, or if it does not exist yet or
        the others are to fork from it, once they have. Unknown and finished ones and beams are
        ignored."""
        request = self._pool.by_id.get(request_id)
        if request is None or request.beam_search is not None:
            return
        if not 0 <= index < request.num_sequences:
            return
        is_running = request.status is RequestStatus.RUNNING
        is_whole = len(request.sequences) == request.num_sequences
        if not is_whole or (is_running and request.has_pending_forks):
            self._samples_to_finish[request_id, index] = finished_status
            return
        sample = request.sequences[index]
        if sample.status.is_finished:
            return
        num_in_flight = self._in_flight.num_tokens_in_flight(sample)
        self._drop_computed_from(sample, sample.num_computed_tokens - num_in_flight)
        sample.status = finished_status
        self._pool.emit_output(sample, [])

    # ------------------------------------------------------------------ numbers

    @property
    def max_steps_in_flight(self) -> int:
        """Most steps planned and not updated."""
        return self._in_flight.max_steps_in_flight

    @property
    def in_flight(self) -> list[InFlightStep]:
        """Steps planned and not updated, in order."""
        return self._in_flight.steps

    @property
    def next_step_id(self) -> int:
        """Of the next plan."""
        return self._in_flight.next_step_id

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting); preempted requests wait."""
        pool = self._pool
        return len(pool.running), len(pool.waiting) + len(pool.compiling)

    def has_work(self) -> bool:
        """Whether a request is unfinished or a terminal output has not been handed out. Steps in
        flight whose requests have all ended do not count, and are still to be updated."""
        return bool(self._pool.by_id) or self._pool.outputs.has_terminal

    def may_progress(self) -> bool:
        """`has_work`, less requests that wait for the end of a pause."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return self._pool.outputs.has_terminal
        return self.has_work() or self._kv_cache.has_blocks_to_save

    def set_pause_state(self, state: PauseState, why: str = "") -> None:
        """`why` is for explanations."""
        self.pause_state, self._pause_why = state, why
        self._waiting.starts_no_new = state is PauseState.PAUSED_NEW

    def preempt_all(self, why: str) -> None:
        """The next plan, of a paused scheduler, preempts every running request to be recomputed,
        swapped ones with them; after it no sequence holds blocks."""
        self._preempt_all_why = why

    def forget_runner(self) -> None:
        """After the plan of `preempt_all`: the next runner knows no request, and its cache is
        empty."""
        self.adapters.drop_all()
        self._encoder.forget()
        self._kv_cache.evict_cached()
        for sequence in self._unfinished_sequences():
            sequence.is_known_to_runner = False

    def reserve_adapter_slot(self, adapter: str) -> int | None:
        """As if a request waited for it; None: it has a slot, or there is none for it."""
        return self.adapters.reserve(adapter, self._pool.running.values())

    def requests_with_adapter(self, adapter: str) -> list[str]:
        """Ids of the unfinished ones."""
        return [name for name, each in self._pool.by_id.items() if each.adapter == adapter]

    def use_weights(self, name: str, version: int) -> None:
        """After the plan of `preempt_all`: a runner of other weights follows, which has this cache
        and knows no request. Blocks of those before are not found under this name; outputs carry
        the version."""
        self.adapters.drop_all()
        self._encoder.forget()
        self._kv_cache.use_weights(name, self._unfinished_sequences())
        self._pool.outputs.weights_version = version
        for sequence in self._unfinished_sequences():
            sequence.is_known_to_runner = False

    def explain(self, request_id: str) -> RequestInfo | None:
        """Why a request is where it is; None if it is unknown, or finished long ago."""
        request = self._pool.by_id.get(request_id)
        if request is None:
            return self._explanations.of_finished(request_id)
        num_ahead = None
        if request.status is not RequestStatus.RUNNING:
            waiting = enumerate(self._pool.waiting)
            num_ahead = next((count for count, other in waiting if other is request), 0)
        return self._explanations.of_unfinished(request, num_ahead, self._feedback.now)

    def explain_all(self, tenant: str | None) -> RequestInfos:
        """Why each unfinished request is where it is; only those of `tenant`, if given."""
        pool = self._pool
        waiting = itertools.chain(pool.waiting, pool.compiling.values())
        num_asked = len(pool.by_id) if tenant is None else pool.num_by_tenant[tenant]
        return self._explanations.of_all(
            pool.running.values(), waiting, tenant, num_asked, self._feedback.now
        )

    def reset_prefix_cache(self) -> int:
        """Drop every cached block that no request holds. Returns how many."""
        return self._kv_cache.reset_prefix_cache()

    def statistics(self) -> EngineStatistics:
        """The numbers of this moment; those of the engine around the scheduler are 0."""
        num_kept = self._encoder.num_kept
        return collect_statistics(self._pool, self._feedback.now, num_encoder_tokens=num_kept)

    def view(self, steps: Iterable[tuple[SchedulerOutput, float]]) -> SchedulerView:
        """Requests and blocks of this moment, and these steps, with the seconds that they took."""
        first = next(iter(self._pool.waiting), None)
        why = None
        if first is not None:
            why = self._explanations.of_unfinished(first, 0, self._feedback.now).why
        return scheduler_view(self._pool, steps, why)

    def check(self) -> None:
        """Assert that steps, queues, rows, counters and the cache agree with each other."""
        self._in_flight.check()
        self.adapters.check()
        self._encoder.check()
        check_pool(self._pool)
