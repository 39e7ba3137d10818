"""The step that takes the most memory, as a plan: what the KV cache must leave room for. As many
tokens and rows as a step may have, and every row samples with all that sampling offers.
"""

import numpy as np

from engine_core.kv_cache import CacheCopies
from engine_core.model_runner.config import RunnerConfig
from engine_core.scheduler import NewRequestData, ScheduledBatch, SchedulerOutput
from protocol.sampling import SamplingParams

_ONLY_BLOCK = 1
"""Every entry of every block table. Rows overwrite each other there: memory is measured, not
answers."""


def prompt_lengths(config: RunnerConfig) -> list[int]:
    """Tokens of each row: together as many as the step may have, the first rows longest.

    A prompt leaves room for one more token in max_model_len.
    """
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    left = config.max_num_batched_tokens - num_rows
    lengths = []
    for _ in range(num_rows):
        more = max(0, min(left, config.max_model_len - 2))
        lengths.append(1 + more)
        left -= more
    return lengths


def profile_steps(config: RunnerConfig, *, num_logprobs: int) -> list[SchedulerOutput]:
    """Plans to be run in order on a runner with at least one block: the largest step that computes
    prompts, the largest that decodes, and one without tokens, which frees all rows.

    Args:
        num_logprobs: the most that are reported for a token.
    """
    lengths = prompt_lengths(config)
    names = [f"profile-{row}" for row in range(len(lengths))]
    counts = np.array(lengths, np.int32)
    nothing = np.zeros(len(lengths), np.int32)
    new = [
        _new_request(name, row, length, config, num_logprobs)
        for row, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]
    return [
        _plan(0, names, nothing, counts, new=new),
        _plan(1, names, counts, np.ones_like(counts)),
        _plan(2, [], nothing[:0], nothing[:0], finished=names),
    ]


def _new_request(
    name: str, row: int, length: int, config: RunnerConfig, num_logprobs: int
) -> NewRequestData:
    num_blocks = -(-(length + 1) // config.block_size)
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
            logprobs=num_logprobs,
        ),
        block_ids=tuple([_ONLY_BLOCK] * num_blocks for _ in range(config.num_groups)),
        num_computed_tokens=0,
        lora_request=None,
        row=row,
    )


def _plan(
    step_id: int,
    names: list[str],
    computed: np.ndarray,
    scheduled: np.ndarray,
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
