"""What vLLM's plans say besides, made of what ours say."""

from itertools import takewhile
from types import SimpleNamespace

from engine_core.scheduler import RequestStatus


def cached_requests(plan):
    """`scheduled_cached_reqs`: the known sequences of a plan, by id."""
    new = {data.req_id for data in plan.scheduled_new_reqs}
    resumed = {data.req_id: data for data in plan.resumed_reqs}
    changed = {update.req_id: update for update in plan.block_updates} | resumed
    return {
        req_id: SimpleNamespace(
            resumed_from_preemption=req_id in resumed,
            new_block_ids=changed[req_id].block_ids if req_id in changed else None,
            num_computed_tokens=int(plan.batch.num_computed_tokens[index]),
            num_output_tokens=int(plan.num_output_tokens[index]),
            resumed_token_ids=resumed[req_id].token_ids if req_id in resumed else None,
        )
        for index, req_id in enumerate(plan.batch.req_ids)
        if req_id not in new
    }


def num_tokens_with_spec(request):
    """Of its first sequence, with the drafts that are to be verified."""
    return request.num_tokens + len(request.sequences[0].spec_token_ids)


def num_common_prefix_blocks(kv_cache, requests):
    """For each group, leading blocks that all running sequences share; none for fewer than two."""
    running = [each for each in requests if each.status is RequestStatus.RUNNING]
    tables = [kv_cache.block_ids(sequence) for each in running for sequence in each.unfinished]
    if len(tables) < 2:
        return [0]
    return [
        len([*takewhile(lambda ids: len({*ids}) == 1, zip(*group, strict=False))])
        for group in zip(*tables, strict=True)
    ]
