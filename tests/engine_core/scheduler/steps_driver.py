"""A scheduler with two steps in flight, a call at a time; tokens as the test says."""

import numpy as np
from driving import make_scheduler

from engine_core.scheduler import ModelRunnerOutput
from tests.protocol.all_outputs import all_outputs

EOS = 9
EMPTY = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])


class Flight:
    """Tokens as a column, or as lists where one is empty."""

    def __init__(self, *requests, **options):
        self.scheduler = make_scheduler(**{"max_steps_in_flight": 2, **options})
        self.add(*requests)
        self.outputs = []

    def add(self, *requests):
        for request in requests:
            self.scheduler.add_request(request)

    def plan(self, now=0.0):
        plan = self.scheduler.schedule(now)
        self.scheduler.check()
        return plan

    def update(self, plan, now=0.0, **tokens):
        """Token 7 for those not named."""
        names = plan.batch.req_ids
        column = np.array([tokens.get(name, 7) for name in names], np.int32)
        output = ModelRunnerOutput(req_ids=names, sampled_token_ids=column)
        self.collect(self.scheduler.update_from_output(plan, output, now))

    def update_with_lists(self, plan, **tokens):
        names = plan.batch.req_ids
        lists = [tokens.get(name, []) for name in names]
        output = ModelRunnerOutput(req_ids=names, sampled_token_ids=lists)
        self.collect(self.scheduler.update_from_output(plan, output))

    def collect(self, outputs):
        self.outputs = [output for one in outputs.values() for output in all_outputs(one)]
        self.scheduler.check()


def batch_of(plan):
    batch = plan.batch
    computed, scheduled = batch.num_computed_tokens.tolist(), batch.num_scheduled_tokens.tolist()
    return dict(zip(batch.req_ids, zip(computed, scheduled, strict=True), strict=True))
