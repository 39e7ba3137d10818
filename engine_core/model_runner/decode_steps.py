"""A plan of several decode steps, carried out one by one: each computes what the one before it
sampled."""

import dataclasses
from collections.abc import Callable

import numpy as np

from engine_core.scheduler import ModelRunnerOutput, ScheduledBatch, SchedulerOutput


def run_decode_steps(
    plan: SchedulerOutput, run: Callable[[SchedulerOutput], ModelRunnerOutput]
) -> ModelRunnerOutput:
    """
    Args:
        plan: its rows and copies are in place.
        run: computes a plan of one step, and appends to its rows what it samples.
    """
    batch, num_steps = plan.batch, plan.num_decode_steps
    sampled = np.zeros((len(batch.rows), num_steps), np.int32)
    num_sampled = batch.num_scheduled_tokens.copy()
    failed = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
    places, req_ids = np.arange(len(batch.rows)), batch.req_ids
    for step in range(num_steps):
        goes_on = num_sampled[places] > step
        if not goes_on.all():
            places = places[goes_on]
            req_ids = [batch.req_ids[place] for place in places.tolist()]
        if not req_ids:
            break
        one = ScheduledBatch(
            req_ids=req_ids,
            rows=batch.rows[places],
            num_computed_tokens=batch.num_computed_tokens[places] + np.int32(step),
            num_scheduled_tokens=np.ones(len(places), np.int32),
        )
        output = run(dataclasses.replace(plan, batch=one, num_decode_steps=1))
        sampled[places, step] = output.sampled_token_ids
        if output.failures:
            num_sampled[places[[name in output.failures for name in req_ids]]] = step
            if not step:  # of a later one: it fails again as the first of the next plan
                failed = output
    if (num_sampled == batch.num_scheduled_tokens).all():
        return ModelRunnerOutput(req_ids=batch.req_ids, sampled_token_ids=sampled)
    counts = num_sampled.tolist()
    return ModelRunnerOutput(
        req_ids=batch.req_ids,
        sampled_token_ids=[
            row[:count] for row, count in zip(sampled.tolist(), counts, strict=True)
        ],
        failures=failed.failures,
        refused=failed.refused,
    )
