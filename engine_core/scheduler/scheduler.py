"""First come, first served, without phases: each step lets requests catch up with their tokens.

Owns the limits and the turn of steps. Must not know tensors, sockets, clocks or text.

    waiting ──admit──> running ──stop──> finished         schedule: running first, in order, then
       ^                  │                               waiting, while budget, rows and blocks
       └──── preempt ─────┘ (the newest goes first)       last; a prompt too long is chunked
"""

from collections.abc import Iterable

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.errors import DuplicateRequestId
from engine_core.scheduler.interface import SchedulerInterface
from engine_core.scheduler.live_requests import LiveRequests
from engine_core.scheduler.output_collector import trim_logprobs
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request, prompt_too_long
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.statistics import SchedulerStatistics
from engine_core.scheduler.step import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.step_planner import StepPlanner
from engine_core.scheduler.step_turns import StepTurns
from engine_core.scheduler.stop_check import append_until_stop, check_stop
from protocol.outputs import EngineCoreOutputs, Logprobs


class Scheduler(SchedulerInterface):
    """
    Args:
        kv_cache: the blocks; nobody else may change it.
        max_num_batched_tokens: most tokens of a step.
        max_num_seqs: most requests running at once.
        max_model_len: most tokens of a request, prompt and output.
        max_chunk_size: most tokens of one request's prompt in a step; None for no such limit.

    Raises:
        ValueError: a limit below 1 (below 2 for `max_model_len`).
    """

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        max_chunk_size: int | None = None,
    ) -> None:
        if max_chunk_size is None:
            max_chunk_size = max_num_batched_tokens
        for name, value, minimum in (
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("max_num_seqs", max_num_seqs, 1),
            ("max_model_len", max_model_len, 2),
            ("max_chunk_size", max_chunk_size, 1),
        ):
            if value < minimum:
                raise ValueError(f"{name} is {value}, it must be at least {minimum}; raise it")
        self._kv_cache = kv_cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._live = LiveRequests(kv_cache)
        self._planner = StepPlanner(
            self._live,
            kv_cache,
            max_num_seqs=max_num_seqs,
            max_chunk=min(max_chunk_size, max_num_batched_tokens),
        )
        self._turns = StepTurns()
        self._num_steps = 0

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        live = self._live
        if request.request_id in live.by_id or live.outputs.is_terminal_pending(request.request_id):
            raise DuplicateRequestId(request.request_id)
        if request.priority != 0:
            raise ValueError(
                f"priority is {request.priority}, the policy is first come, first served; omit it"
            )
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"{request} has been scheduled before; make a new Request")
        live.add(request)
        if request.num_prompt_tokens >= self._max_model_len:
            why = prompt_too_long(request.num_prompt_tokens, self._max_model_len)
            live.end(request, RequestStatus.FINISHED_IGNORED, why)
        elif request.num_output_tokens and check_stop(request, self._max_model_len):
            live.tell(request, [])
        elif (why_never := self._planner.why_never(request)) is not None:
            live.end(request, RequestStatus.FINISHED_IGNORED, why_never)

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
            if request is None:
                continue
            if finished_status is RequestStatus.FINISHED_ERROR:
                # whatever went wrong may be in any of its blocks, and must not spread
                self._kv_cache.forget(request)
            else:
                self._forget_open_step(request)
            self._live.end(request, finished_status, detail)

    def _forget_open_step(self, request: Request) -> None:
        """Blocks became findable with the plan; of a step without a result nobody knows whether
        it will fill them."""
        num_open = self._turns.num_open_tokens(request.request_id)
        if num_open:
            self._kv_cache.forget(request, request.num_computed_tokens - num_open)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> SchedulerOutput:
        live = self._live
        self._turns.check_may_plan(live.by_id)
        plan = PlanBuilder(self._max_num_batched_tokens)
        self._planner.fill(plan)
        scheduler_output = plan.build(
            step_id=self._turns.next_step_id,
            num_common_prefix_blocks=self._kv_cache.num_common_prefix_blocks(
                next(iter(live.running.values()), None), len(live.running)
            ),
            finished_req_ids=live.take_finished_req_ids(),
        )
        self._turns.planned(scheduler_output)
        self._num_steps += scheduler_output.total_num_scheduled_tokens > 0
        return scheduler_output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._turns.updated(scheduler_output)
        for request_id, why in model_runner_output.failures.items():
            self.finish_requests(request_id, RequestStatus.FINISHED_ERROR, why)
        sampled = dict(
            zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=True)
        )
        logprobs = model_runner_output.logprobs or {}
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self._live.by_id.get(request_id)
            if request is not None:  # else it ended while in flight
                num_drafts = len(drafts[request_id]) if request_id in drafts else 0
                token_ids = sampled.get(request_id, [])
                self._take_tokens(request, token_ids, num_drafts, logprobs.get(request_id))
        if model_runner_output.draft_token_ids is not None:
            self.update_draft_token_ids(model_runner_output.draft_token_ids)
        return self._live.outputs.take(scheduler_output.step_id)

    def _take_tokens(
        self, request: Request, token_ids: list[int], num_drafts: int, logprobs: Logprobs | None
    ) -> None:
        """What was sampled for one request: nothing before its tokens are all computed, else one
        token behind the accepted drafts."""
        is_due = request.num_computed_tokens >= request.num_tokens
        most = 1 + num_drafts if is_due else 0
        if not is_due <= len(token_ids) <= most:
            why = (
                f"the model runner returned {len(token_ids)} tokens, from {int(is_due)} to {most} "
                "were due; this is a fault of the engine, please report it"
            )
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR, why)
        elif is_due:
            # rejected drafts were computed for nothing: their slots are written again
            request.num_computed_tokens -= most - len(token_ids)
            kept = append_until_stop(request, token_ids, self._max_model_len)
            if logprobs is not None:
                logprobs = trim_logprobs(logprobs, len(kept))
            self._live.tell(request, kept, logprobs)

    def discard_step(self, scheduler_output: SchedulerOutput, detail: str) -> None:
        self._turns.check_open(scheduler_output)
        ended = [
            self._live.by_id[request_id]
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in self._live.by_id
        ]
        for request in ended:
            self._forget_open_step(request)
            self._live.end(request, RequestStatus.FINISHED_ERROR, detail)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self._live.running.get(request_id)
            if request is None or request.num_tokens - request.num_computed_tokens != 1:
                continue
            # one token comes behind the drafts in any case
            limit = min(
                request.max_tokens - request.num_output_tokens - 1,
                self._max_model_len - request.num_tokens - 1,
            )
            request.spec_token_ids = drafts[: max(0, limit)]

    # ------------------------------------------------------------------ numbers

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._live.running), len(self._live.waiting)

    def has_work(self) -> bool:
        return bool(self._live.by_id) or self._live.outputs.has_terminal

    def reset_prefix_cache(self) -> int:
        return self._kv_cache.reset_prefix_cache()

    def statistics(self) -> SchedulerStatistics:
        counters = self._live.counters
        return SchedulerStatistics(
            num_running=len(self._live.running),
            num_waiting=len(self._live.waiting),
            num_blocks=self._kv_cache.num_blocks,
            num_blocks_in_use=self._kv_cache.num_blocks_in_use,
            num_blocks_cached=self._kv_cache.num_blocks_cached,
            block_size=self._kv_cache.block_size,
            num_steps=self._num_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_prompt_tokens=counters.num_cached_prompt_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_preemptions=counters.num_preemptions,
            num_finished=dict(counters.num_finished),
        )
