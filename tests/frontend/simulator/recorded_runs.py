"""Records of runs in virtual time, written by the production recorder."""

import dataclasses
from collections import deque
from contextlib import closing

import numpy as np

from engine_core.kv_cache import KVCacheManager
from engine_core.observers.base import FinishedStep
from engine_core.observers.trace import TraceWriter
from engine_core.scheduler import Request, SchedulerConfig
from engine_core.scheduler.request import RequestStatus
from engine_core.scheduler.runner_output import ModelRunnerOutput
from engine_core.startup.scheduler import build_scheduler
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

EOS = 7


@dataclasses.dataclass(frozen=True)
class Asked:
    arrival_s: float
    num_prompt: int
    max_tokens: int
    shared: int = 0
    """Tokens that all prompts begin with."""
    abort_s: float | None = None


def record_run(
    path,
    asked,
    *,
    seed=0,
    num_blocks=40,
    step_s=lambda tokens, sequences: 0.01 + 0.001 * tokens + 0.002 * sequences,
    between_s=0.0,
    depth=1,
    poison=None,
):
    """As the daemon does it: drain, plan, run, update, record. Samples at random, also EOS. With
    a depth of 2 each step is planned while the one before it runs. Steps fail with request
    `poison` in them."""
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 200}
    if depth > 1:
        limits["max_steps_in_flight"] = depth
    config = {
        "num_blocks": num_blocks,
        "block_size": 16,
        "watermark": 0.0,
        "scheduler": limits,
        "eos_token_ids": [EOS],
    }
    cache = KVCacheManager(num_blocks=num_blocks, block_size=16, watermark=0.0)
    scheduler = build_scheduler(SchedulerConfig(**limits), cache)
    random = np.random.default_rng(seed)
    todo = sorted(
        [(one.arrival_s, index, "arrive") for index, one in enumerate(asked)]
        + [(one.abort_s, index, "abort") for index, one in enumerate(asked) if one.abort_s]
    )
    now_s = end_s = 0.0
    in_flight = deque()
    with closing(
        TraceWriter(path, config=config, started_s=0.0, max_steps_in_flight=depth)
    ) as trace:
        while todo or scheduler.has_work() or in_flight:
            if not scheduler.has_work() and not in_flight:
                # as an idle daemon does between heartbeats: not recorded
                _step(scheduler, now_s, random)
                now_s = max(now_s, todo[0][0])
            while todo and todo[0][0] <= now_s:
                _, index, what = todo.pop(0)
                if what == "abort":
                    scheduler.finish_requests([f"r{index}"], RequestStatus.FINISHED_ABORTED)
                    trace.on_abort([f"r{index}"], now_s)
                    continue
                message = _message(index, asked[index], random)
                scheduler.add_request(
                    Request(message, client_index=0, arrival_time=now_s, eos_token_ids=[EOS])
                )
                trace.on_arrival(message, 0, now_s)
            plan, sampled = _plan(scheduler, now_s, random)
            trace.on_plan(plan, now_s)
            in_flight.append((plan, sampled, now_s))
            while in_flight and (
                len(in_flight) >= depth or not in_flight[-1][0].total_num_scheduled_tokens
            ):
                plan, sampled, planned_s = in_flight.popleft()
                step = scheduler.in_flight[0]
                batch = plan.batch
                end_s = max(end_s, planned_s) + step_s(
                    int(batch.num_scheduled_tokens.sum()), len(batch.req_ids)
                )
                if poison in batch.req_ids:
                    scheduler.discard_step(plan, "it is poison")
                if step.is_discarded:
                    sampled = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
                outputs = scheduler.update_from_output(plan, sampled, now=end_s)
                trace.on_step(FinishedStep(plan, sampled, planned_s, end_s, end_s, bool(outputs)))
                now_s = max(now_s, end_s) + between_s
    return path


def _message(index, one, random):
    own = random.integers(100, 10_000, one.num_prompt - one.shared)
    return EngineRequest(
        request_id=f"r{index}",
        prompt_token_ids=[*range(50, 50 + one.shared), *own.tolist()],
        sampling_params=SamplingParams(max_tokens=one.max_tokens),
    )


def _plan(scheduler, now_s, random):
    plan = scheduler.schedule(now=now_s)
    ids = plan.batch.req_ids
    tokens = random.integers(0, 60, len(ids)).astype(np.int32)
    return plan, ModelRunnerOutput(req_ids=ids, sampled_token_ids=tokens)


def _step(scheduler, now_s, random):
    plan, sampled = _plan(scheduler, now_s, random)
    scheduler.update_from_output(plan, sampled, now=now_s)
