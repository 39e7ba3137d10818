"""The scheduler at one moment, for those who watch. Its cost is bounded: of long queues only the
beginning is read."""

from collections.abc import Iterable
from itertools import islice
from zlib import crc32

import numpy as np

from engine_core.kv_cache.block_map import block_map
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.scheduler import Scheduler
from protocol.snapshots import (
    FIRST_REQUEST,
    IN_USE,
    MAX_CHUNKS,
    MAX_REQUESTS,
    RequestSummary,
    SchedulerView,
    StepSummary,
)


def scheduler_view(
    scheduler: Scheduler, steps: Iterable[tuple[SchedulerOutput, float]]
) -> SchedulerView:
    """
    Args:
        steps: plans, and the seconds that they took.
    """
    pool, why_first_waits = scheduler.pool, scheduler.explanations.why_first_waits()
    held = {
        request.request_id: [pool.kv_cache.held_blocks(each) for each in request.unfinished]
        for request in pool.running.values()
    }
    listed = list(islice(pool.running.values(), MAX_REQUESTS))
    owners = {request.request_id: FIRST_REQUEST + index for index, request in enumerate(listed)}
    requests = [_summary(each, sum(map(len, held[each.request_id])), None) for each in listed]
    for request in islice(pool.waiting, MAX_REQUESTS):
        requests.append(_summary(request, 0, why_first_waits))
        why_first_waits = None
    return SchedulerView(
        steps=[_step(pool, plan, duration_s) for plan, duration_s in steps],
        requests=requests,
        blocks=block_map(
            pool.kv_cache.num_blocks,
            pool.kv_cache.cached_blocks,
            [
                (owners.get(request_id, IN_USE), blocks)
                for request_id, tables in held.items()
                for blocks in tables
            ],
        ),
    )


def _number(request_id: str) -> int:
    return crc32(request_id.encode()) or 1


def _summary(request: Request, num_blocks: int, why: str | None) -> RequestSummary:
    return RequestSummary(
        number=_number(request.request_id),
        request_id=request.request_id,
        tenant=request.message.tenant,
        status=request.status.name.lower(),
        num_sequences=request.num_sequences,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.account.num_cached_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.sampling_params.max_tokens,
        num_preemptions=request.account.num_preemptions,
        num_blocks=num_blocks,
        why=why,
    )


def _step(pool: RequestPool, plan: SchedulerOutput, duration_s: float) -> StepSummary:
    batch = plan.batch
    chunks = []
    is_longer = (batch.num_scheduled_tokens > 1) & (plan.num_decode_steps == 1)
    for place in np.flatnonzero(is_longer).tolist():
        name = batch.req_ids[place]
        if name not in plan.scheduled_spec_decode_tokens:
            # "ID#1" is a sequence of request "ID", which may have ended
            request_id = name if name in pool.by_id else name.rpartition("#")[0] or name
            chunks.append((_number(request_id), int(batch.num_scheduled_tokens[place])))
    num_prefill_tokens = sum(tokens for _, tokens in chunks)
    if len(chunks) > MAX_CHUNKS:
        rest = sum(tokens for _, tokens in chunks[MAX_CHUNKS - 1 :])
        chunks = [*chunks[: MAX_CHUNKS - 1], (0, rest)]
    return StepSummary(
        step_id=plan.step_id,
        token_budget=plan.token_budget,
        num_decode_tokens=plan.total_num_scheduled_tokens - num_prefill_tokens,
        prefill_chunks=chunks,
        num_preempted=len(plan.preempted_req_ids),
        duration_s=duration_s,
    )
