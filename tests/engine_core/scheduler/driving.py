"""Short words for tests: a scheduler, requests, and a runner that samples given tokens."""

from scenario_help import make_request

from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.scheduler import (
    ModelRunnerOutput,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import PreemptionRule
from engine_core.scheduler.token_budget.base import TokenBudget
from engine_core.startup.scheduler import build_scheduler
from protocol.outputs import EngineCoreOutput
from tests.protocol.all_outputs import all_outputs

__all__ = ["Drive", "make_request", "make_scheduler", "result"]


def make_scheduler(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    budget: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    max_chunk_size: int | None = None,
    watermark: float = 0.0,
    groups: tuple[KVCacheGroupSpec, ...] = (KVCacheGroupSpec(),),
    num_host_blocks: int = 0,
    policy: SchedulingPolicy | None = None,
    preemption_rule: PreemptionRule | None = None,
    token_budget: TokenBudget | None = None,
    **settings,
) -> Scheduler:
    return build_scheduler(
        SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_chunk_size=max_chunk_size,
            **settings,
        ),
        KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            watermark=watermark,
            groups=groups,
            num_host_blocks=num_host_blocks,
        ),
        policy=policy,
        preemption_rule=preemption_rule,
        token_budget=token_budget,
    )


def result(
    plan: SchedulerOutput, tokens: dict[str, list[int]], requests: list[Request]
) -> ModelRunnerOutput:
    """Token 7 for each request that is to sample and not named in `tokens`, and for forks."""
    samples = {
        request.request_id: request.num_computed_tokens >= request.num_tokens
        for request in requests
    }
    names = list(plan.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        sampled_token_ids=[
            tokens.get(name, [7] if samples.get(name, True) else []) for name in names
        ],
    )


class Drive:
    """A scheduler and its requests, a step at a time."""

    def __init__(self, scheduler: Scheduler, *requests: Request) -> None:
        self.scheduler = scheduler
        self.requests: list[Request] = []
        self.outputs: list[EngineCoreOutput] = []
        self.add(*requests)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.requests.append(request)

    def step(self, **tokens: list[int]) -> SchedulerOutput:
        """Plan, run and update; tokens by request id."""
        plan = self.scheduler.schedule()
        self.finish(plan, **tokens)
        return plan

    def finish(self, plan: SchedulerOutput, **tokens: list[int]) -> None:
        output = result(plan, tokens, self.requests)
        self.outputs = [
            output
            for per_client in self.scheduler.update_from_output(plan, output).values()
            for output in all_outputs(per_client)
        ]
