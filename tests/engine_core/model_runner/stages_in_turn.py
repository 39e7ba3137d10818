"""The stages of a pipeline in one process, one after the other: a runner each, and between them a
queue in place of collectives. What the last one samples is known to the first when it is collected.
"""

import collections

import torch

from engine_core.distributed.parallel import Parallel
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.sampled_tokens import SampledTokens
from engine_core.models.loading import load_model
from tests.engine_core.model_runner.runners import runner_config, spoiled


class QueuedCollectives:
    """`Collectives` of one stage; sends to the next one's queue."""

    def __init__(self, pp_rank, queues):
        self.parallel = Parallel(pp_rank=pp_rank, pp_size=len(queues))
        self._queues = queues

    def all_reduce_(self, x):
        return x

    def all_gather(self, x):
        return x[None]

    def send(self, x, stage):
        assert stage == self.parallel.pp_rank + 1
        self._queues[stage].append(x.clone())

    def recv(self, into, stage):
        assert stage == self.parallel.pp_rank - 1
        return into.copy_(self._queues[self.parallel.pp_rank].popleft())

    def close(self):
        pass


def load_stages(reference, ops, num_stages):
    """The weights of a model of transformers, a model a stage."""
    queues = [collections.deque() for _ in range(num_stages)]
    return [
        load_model(
            reference.config.to_dict(),
            reference.state_dict().items(),
            dtype=torch.float32,
            ops=ops,
            collectives=QueuedCollectives(stage, queues),
        )
        for stage in range(num_stages)
    ]


class StagesInTurn:
    """A `StepRunner`."""

    def __init__(self, models, ops, **options):
        self.stages = [
            spoiled(CPUModelRunner(runner_config(model, ops, stage=model.stage, **options)))
            for model in models
        ]
        self.max_steps_in_flight = len(models)
        self._sampled = []
        self._steps = collections.deque()

    @property
    def rows(self):
        return self

    def check(self):
        """Of all stages' rows."""
        for stage in self.stages:
            stage.rows.check()
        assert len({str(stage.rows.row_of) for stage in self.stages}) == 1

    def submit(self, plan):
        assert len(self._steps) < self.max_steps_in_flight
        for sampled in self._sampled:
            self.stages[0].batch.take_sampled(sampled)
        self._sampled.clear()
        outputs = [stage.execute(plan) for stage in self.stages]
        assert not any(output.req_ids for output in outputs[:-1])
        self._steps.append((plan, outputs[-1]))

    def collect(self):
        plan, output = self._steps.popleft()
        sampled = SampledTokens.of(plan, output)
        if sampled is not None:
            self._sampled.append(sampled)
        return output

    def check_device(self):
        pass
