"""The step that takes the most memory, as a plan: what the KV cache must leave room for. As many
tokens and rows as a step may have, and every row samples with all that sampling offers.
"""

import dataclasses

import numpy as np

from engine_core.kv_cache import CacheCopies
from engine_core.scheduler import NewRequestData, ScheduledBatch, SchedulerOutput
from protocol.sampling import SamplingParams

_ONLY_BLOCK = 1
"""Every entry of every block table. Rows overwrite each other there: memory is measured, not
answers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """The most that a step can be."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_groups: int
    num_logprobs: int
    """The most that are reported for a token."""

    def prompt_lengths(self) -> list[int]:
        """Tokens of each row: together as many as the step may have, the first rows longest.

        A prompt leaves room for one more token in max_model_len.
        """
        num_rows = min(self.max_num_seqs, self.max_num_batched_tokens)
        left = self.max_num_batched_tokens - num_rows
        lengths = []
        for _ in range(num_rows):
            more = max(0, min(left, self.max_model_len - 2))
            lengths.append(1 + more)
            left -= more
        return lengths


def profile_steps(limits: LargestStep) -> list[SchedulerOutput]:
    """Plans to be run in order on a runner with at least one block: the largest step that computes
    prompts, the largest that decodes, and one without tokens, which frees all rows."""
    lengths = limits.prompt_lengths()
    names = [f"profile-{row}" for row in range(len(lengths))]
    counts = np.array(lengths, np.int32)
    nothing = np.zeros(len(lengths), np.int32)
    new = [
        _new_request(name, row, length, limits)
        for row, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]
    return [
        _plan(0, names, nothing, counts, limits, new=new),
        _plan(1, names, counts, np.ones_like(counts), limits),
        _plan(2, [], nothing[:0], nothing[:0], limits, finished=names),
    ]


def _new_request(name: str, row: int, length: int, limits: LargestStep) -> NewRequestData:
    num_blocks = -(-(length + 1) // limits.block_size)
    return NewRequestData(
        req_id=name,
        prompt_token_ids=[0] * length,
        output_token_ids=[],
        mm_features=[],
        sampling_params=SamplingParams(
            max_tokens=2,
            temperature=1.0,
            top_k=50,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            seed=row,
            logprobs=limits.num_logprobs,
        ),
        block_ids=tuple([_ONLY_BLOCK] * num_blocks for _ in range(limits.num_groups)),
        num_computed_tokens=0,
        lora_request=None,
        row=row,
    )


def _plan(
    step_id: int,
    names: list[str],
    computed: np.ndarray,
    scheduled: np.ndarray,
    limits: LargestStep,
    *,
    new: list[NewRequestData] | None = None,
    finished: list[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        batch=ScheduledBatch(
            req_ids=names,
            rows=np.arange(len(names), dtype=np.int64),
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
        ),
        scheduled_new_reqs=new or [],
        resumed_reqs=[],
        block_updates=[],
        copies=CacheCopies(),
        total_num_scheduled_tokens=int(scheduled.sum()),
        scheduled_spec_decode_tokens={},
        finished_req_ids=finished or [],
        preempted_req_ids=[],
        num_output_tokens=np.zeros(len(names), np.int32),
    )
