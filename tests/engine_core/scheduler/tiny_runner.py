"""A model runner around a tiny model: it reads only plans. Greedy, no cache."""

import numpy as np
from beam_reference import likeliest, tiny_llama

from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput


class Rows:
    """A model runner's tokens of each sequence: only what plans said and what it sampled."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}

    def execute(self, plan: SchedulerOutput, num_candidates: int) -> ModelRunnerOutput:
        for name in [*plan.finished_req_ids, *plan.preempted_req_ids]:
            self.tokens.pop(name, None)
        for data in plan.scheduled_new_reqs:
            self.tokens[data.req_id] = [*data.prompt_token_ids, *data.output_token_ids]
        for data in plan.resumed_reqs:
            self.tokens[data.req_id] = list(data.token_ids)
        names, batch = plan.batch.req_ids, plan.batch
        stops = (batch.num_computed_tokens + batch.num_scheduled_tokens).tolist()
        logprobs, sampled = {}, []
        for name, stop in zip(names, stops, strict=True):
            (logprobs[name],) = likeliest(tiny_llama(), [self.tokens[name][:stop]], num_candidates)
            sampled.append(int(np.frombuffer(logprobs[name].token_ids, "<i4")[0]))
            if stop == len(self.tokens[name]):
                self.tokens[name].append(sampled[-1])
            else:
                self.tokens[name][stop:] = self.tokens[name][stop:] or [sampled[-1]]
        return ModelRunnerOutput(
            req_ids=names,
            sampled_token_ids=np.array(sampled, dtype=np.int32),
            logprobs=logprobs,
        )
