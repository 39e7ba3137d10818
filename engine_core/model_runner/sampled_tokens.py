"""The tokens of a step that another stage of the pipeline sampled."""

import dataclasses

import numpy as np
import numpy.typing as npt

from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTokens:
    """Columns of equal length, several of a row in order. Some stand for no token: those of prompts
    that the step did not finish."""

    step_id: int
    rows: Int64Array
    positions: Int64Array
    """Positions of the tokens in their sequences."""
    token_ids: Int64Array

    @classmethod
    def of(cls, plan: SchedulerOutput, output: ModelRunnerOutput) -> "SampledTokens | None":
        """Tokens that a step has sampled; None if no sequence was in it."""
        batch, sampled = plan.batch, output.sampled_token_ids
        if not len(output.req_ids):
            return None
        assert isinstance(sampled, np.ndarray)
        rows, positions = batch.rows, batch.num_computed_tokens + batch.num_scheduled_tokens
        drafts = plan.scheduled_spec_decode_tokens
        for place, name in enumerate(batch.req_ids) if drafts else ():
            if name in drafts:
                positions[place] -= len(drafts[name])
                more = output.verified_token_ids.get(name, [])[1:]
                behind = positions[place] + 1 + np.arange(len(more))
                rows = np.concatenate((rows, np.full(len(more), rows[place])))
                positions = np.concatenate((positions, behind))
                sampled = np.concatenate((sampled, more))
        return cls(plan.step_id, rows, positions.astype(np.int64), sampled.astype(np.int64))
