"""A scheduler with its cache, driven a step at a time, for the scenarios of earlier engines.

Owns prompts that share nothing by default, and a runner that samples given tokens.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from engine_core.kv_cache import DiskTier, KVCacheGroupSpec, KVCacheManager, Transfers
from engine_core.scheduler import (
    DraftTokenIds,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
)
from engine_core.startup.scheduler import build_scheduler
from protocol.outputs import EngineCoreOutput
from protocol.sampling import SamplingParams
from tests.engine_core.new_request import new_request
from tests.protocol.all_outputs import all_outputs

_fresh = itertools.count(1_000)
_FIELDS = (
    "adapter",
    "arrival_time",
    "beam_search",
    "cache_salt",
    "client_index",
    "eos_token_ids",
    "is_resumed",
    "kv_source",
    "num_sequences",
    "output_token_ids",
    "priority",
    "tenant",
    "timeout_s",
)


def fresh_tokens(count: int) -> list[int]:
    """Token ids that no other prompt has."""
    return list(itertools.islice(_fresh, count))


def make_request(request_id: str, prompt: int | Sequence[int], **options) -> Request:
    """`prompt` as a number: that many fresh tokens. Sampling parameters and fields alike."""
    fields = {name: options.pop(name) for name in _FIELDS if name in options}
    return new_request(
        request_id=request_id,
        prompt_token_ids=fresh_tokens(prompt) if isinstance(prompt, int) else prompt,
        sampling_params=SamplingParams(**{"max_tokens": 50, **options}),
        **fields,
    )


class Scenario:
    """
    Args:
        num_blocks, block_size, watermark, enable_prefix_caching, num_host_blocks, disk, groups: of
            the cache.
        transfers: of blocks from other engines.
        settings: of SchedulerConfig; roomy if not given.
    """

    def __init__(
        self,
        *requests: Request,
        num_blocks: int | list[int] = 1000,
        block_size: int = 16,
        watermark: float = 0.0,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        disk: DiskTier | None = None,
        groups: tuple[KVCacheGroupSpec, ...] = (KVCacheGroupSpec(),),
        transfers: Transfers | None = None,
        **settings,
    ) -> None:
        self.kv_cache = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            watermark=watermark,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            disk=disk,
            groups=groups,
        )
        roomy = {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "max_model_len": 4096}
        config = SchedulerConfig(**{**roomy, **settings})
        self.scheduler = build_scheduler(config, self.kv_cache, transfers=transfers)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, EngineCoreOutput] = {}
        self.now = 0.0
        self.add(*requests)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.requests[request.request_id] = request

    def plan(self, seconds: float = 1.0) -> SchedulerOutput:
        """The next step, that much later than the last one."""
        self.now += seconds
        return self.scheduler.schedule(now=self.now)

    def update(self, plan: SchedulerOutput, **tokens: list[int]) -> None:
        """Token 7 for each request that is to sample and not named in `tokens`."""
        names = list(plan.num_scheduled_tokens)
        samples = [
            self.requests[n].num_computed_tokens >= self.requests[n].num_tokens for n in names
        ]
        sampled = [
            tokens.get(name, [7] if needs_sampling else [])
            for name, needs_sampling in zip(names, samples, strict=True)
        ]
        self.take(plan, ModelRunnerOutput(req_ids=names, sampled_token_ids=sampled))

    def update_with_array(self, plan: SchedulerOutput, token_id: int = 7) -> None:
        """As the model runner does in a step without drafts."""
        names = plan.batch.req_ids
        sampled = np.full(len(names), token_id, dtype=np.int32)
        self.take(plan, ModelRunnerOutput(req_ids=names, sampled_token_ids=sampled))

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        clients = self.scheduler.update_from_output(plan, output, now=self.now)
        self.outputs = {
            output.request_id: output
            for client in clients.values()
            for output in all_outputs(client)
        }

    def step(self, **tokens: list[int]) -> SchedulerOutput:
        """Plan, run, update; tokens by request id."""
        plan = self.plan()
        self.update(plan, **tokens)
        return plan

    def draft(self, **drafts: list[int]) -> None:
        self.scheduler.update_draft_token_ids(
            DraftTokenIds(req_ids=list(drafts), draft_token_ids=list(drafts.values()))
        )

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return self.scheduler.get_request_counts()

    def run_to_end(self, most_steps: int = 1000) -> None:
        """Until nothing is left, in at most that many steps."""
        for _ in range(most_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"{self.counts} are left after {most_steps} steps")


def new_ids(plan: SchedulerOutput) -> list[str]:
    """Who is scheduled for the first time, in order."""
    return [data.req_id for data in plan.scheduled_new_reqs]


def num_found(plan: SchedulerOutput, request_id: str) -> int:
    """Prompt tokens that a request of this plan found in the cache."""
    (found,) = [d.num_computed_tokens for d in plan.scheduled_new_reqs if d.req_id == request_id]
    return found


def blocks_of(plan: SchedulerOutput, request_id: str) -> list[int]:
    """The block table that a new request of this plan starts with."""
    (tables,) = [data.block_ids for data in plan.scheduled_new_reqs if data.req_id == request_id]
    return tables[0]
