"""Collects one step's plan while the scheduler decides. Decides nothing itself."""

from engine_core.kv_cache import BlockIds
from engine_core.scheduler.request import Request
from engine_core.scheduler.step import CachedRequestData, NewRequestData, SchedulerOutput


class PlanBuilder:
    """Each `add_*` charges the request's tokens to the budget and counts them as computed: a step
    that is planned is going to run.

    Args:
        token_budget: most tokens of the step.
    """

    def __init__(self, token_budget: int) -> None:
        self.budget = token_budget
        """Tokens left."""
        self._token_budget = token_budget
        self._new: list[NewRequestData] = []
        self._cached = CachedRequestData()
        self._num_scheduled: dict[str, int] = {}
        self._drafts: dict[str, list[int]] = {}
        self._preempted: list[str] = []

    def add_running(
        self, request: Request, num_tokens: int, new_blocks: BlockIds, drafts: list[int]
    ) -> None:
        """A request that the runner has a row for. All groups get new blocks, or none does."""
        self._add_known(request, new_blocks if new_blocks[0] else None, None)
        if drafts:
            self._drafts[request.request_id] = drafts
        self._charge(request, num_tokens)

    def add_new(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """A request that the runner has never seen."""
        self._new.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids.copy(),
                mm_features=[],
                sampling_params=request.sampling_params,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                lora_request=request.adapter,
            )
        )
        self._charge(request, num_tokens)

    def add_resumed(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """A request that the runner knows, and whose row it dropped."""
        self._add_known(request, block_ids, request.all_token_ids.copy())
        self._charge(request, num_tokens)

    def add_preempted(self, request: Request) -> None:
        self._preempted.append(request.request_id)

    @property
    def has_preempted(self) -> bool:
        return bool(self._preempted)

    def _add_known(
        self, request: Request, block_ids: BlockIds | None, resumed: list[int] | None
    ) -> None:
        cached = self._cached
        cached.req_ids.append(request.request_id)
        cached.resumed_from_preemption.append(resumed is not None)
        cached.new_block_ids.append(block_ids)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_tokens - request.num_prompt_tokens)
        cached.resumed_token_ids.append(resumed)

    def _charge(self, request: Request, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.budget
        self._num_scheduled[request.request_id] = num_tokens
        self.budget -= num_tokens
        request.num_computed_tokens += num_tokens

    def build(
        self, *, step_id: int, num_common_prefix_blocks: list[int], finished_req_ids: list[str]
    ) -> SchedulerOutput:
        """The finished plan."""
        return SchedulerOutput(
            step_id=step_id,
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=self._cached,
            num_scheduled_tokens=self._num_scheduled,
            total_num_scheduled_tokens=self._token_budget - self.budget,
            scheduled_spec_decode_tokens=self._drafts,
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=num_common_prefix_blocks,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self._preempted,
        )
