"""Samples, beams and pooled prompts record and replay, with host memory and too few blocks."""

import dataclasses
from contextlib import closing

from engine_core.kv_cache import KVCacheManager
from engine_core.observers.base import FinishedStep
from engine_core.observers.trace import TraceWriter
from engine_core.pooler_config import PoolerConfig, PoolingType
from engine_core.scheduler import Request, SchedulerConfig
from engine_core.scheduler.records.prompt_report import PromptReport
from engine_core.startup.scheduler import build_scheduler
from frontend.simulator.replay import verify
from frontend.simulator.step_trace import StepTrace
from protocol.pooling import POOLING_SAMPLING, PoolingParams, PoolingTask
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.scheduler.paged_model import PagedModel

POOLER = PoolerConfig(
    tasks=tuple(PoolingTask),
    hidden_size=2,
    vector_size=2,
    seq_pooling_type=PoolingType.MEAN,
)


def asked(index: int) -> EngineRequest:
    name = f"r{index}"
    prompt = [1 + (index * 7 + place) % 4 for place in range(5 + index % 6)]
    if index % 4 == 1:
        return EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=POOLING_SAMPLING,
            pooling_params=PoolingParams(task=PoolingTask.EMBED),
        )
    if index % 3 == 0:
        return EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=9, temperature=0.0),
            num_sequences=3,
            beam_search=BeamSearchParams(beam_width=3),
        )
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=12, seed=index),
        num_sequences=1 + index % 3,
    )


def record_groups(path):
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 64}
    sizes = {"num_blocks": 12, "block_size": 4, "watermark": 0.0, "num_host_blocks": 12}
    config = {**sizes, "scheduler": limits, "eos_token_ids": [0]}
    config["pooler"] = dataclasses.asdict(POOLER)
    scheduler = build_scheduler(SchedulerConfig(**limits), KVCacheManager(**sizes))
    groups = scheduler.pool.kv_cache.groups
    model = PagedModel(groups, sizes["num_blocks"], sizes["block_size"], sizes["num_host_blocks"])
    now_s = 0.0
    with closing(TraceWriter(path, config=config, started_s=0.0)) as trace:
        for index in range(12):
            message = asked(index)
            model.salts[message.request_id] = None
            request = Request(
                message,
                client_index=0,
                arrival_time=now_s,
                eos_token_ids=[0],
                report=PromptReport.of(message, POOLER),
            )
            scheduler.add_request(request)
            trace.on_arrival(message, 0, now_s)
        while scheduler.has_work():
            plan = scheduler.schedule(now=now_s)
            sampled = model.execute(plan)
            outputs = scheduler.update_from_output(plan, sampled, now=now_s + 0.01)
            ended_s = now_s + 0.01
            trace.on_step(FinishedStep(plan, sampled, now_s, ended_s, ended_s, bool(outputs)))
            now_s += 0.02
    return scheduler.statistics()


def test_samples_and_beams_replay_to_the_same_decisions(tmp_path):
    statistics = record_groups(tmp_path / "run.jsonl")
    assert statistics.num_preemptions_by_swap > 0
    assert statistics.num_blocks_in_use == 0
    verification = verify(StepTrace(tmp_path / "run.jsonl"))
    assert verification.difference is None, str(verification.difference)
    assert verification.num_requests == 12
