"""Dummy steps before the first request: what must be compiled, and what takes most memory. Their
sequences are in the first rows, whose block tables are still all null block."""

import dataclasses
import itertools

import numpy as np

from engine_core.kv_cache import CacheCopies
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.gpu.input_batch import PenaltyRow, RowChanges
from engine_core.model_runner.gpu.step import GPUStep
from engine_core.model_runner.gpu.step_buckets import MAX_LONG_PREFILLS, StepBucket
from kernels.interface.device_steps import SamplingMode
from kernels.interface.sampling_rows import StateFlag, StateWord
from kernels.interface.step_inputs import TOKEN_TABLE, RowUpdate


def dummy_step(counts: list[int], mode: SamplingMode, *, num_rows: int) -> GPUStep:
    """`counts` tokens of each sequence, from its start; all are sampled.

    Args:
        counts: sequences of one token first.
        num_rows: that there are; sequences beyond share these, as with drafts.
    """
    number = len(counts)
    return GPUStep(
        place_R=np.arange(number),
        rows_R=np.arange(number) % num_rows,
        num_computed_R=np.zeros(number, np.int64),
        num_scheduled_R=np.array(counts, np.int64),
        needs_sampling_R=np.ones(number, np.bool_),
        drafts_R=None,
        sampled_N=np.arange(number),
        sampled_rows_N=np.arange(number) % num_rows,
        num_logprobs_N=np.full(number, -1, np.int64),
        from_host_N=np.zeros(0, np.int64),
        num_tokens=sum(counts),
        num_decodes=counts.count(1),
        num_long_prefills=sum(count > 1 for count in counts),
        mode=mode,
        bucket=None,
    )


def padded_step(bucket: StepBucket, mode: SamplingMode, *, num_rows: int) -> GPUStep:
    """The bucket's own, that its graph is captured from."""
    counts = [1] * bucket.num_sequences
    counts[-1] += bucket.num_tokens - bucket.num_sequences
    step = dummy_step(counts, mode, num_rows=num_rows)
    return dataclasses.replace(
        step, num_decodes=len(counts), is_padded=True, num_long_prefills=MAX_LONG_PREFILLS
    )


def steps_of_every_kind(config: RunnerConfig) -> list[list[int]]:
    """Counts of steps that together launch every kernel in every form that depends on sequences:
    decodes, prefills and both; Triton compiles a form of its own for sizes of 1, and for multiples
    of 16, and products with quantised weights have tiles of up to 16, 32 and 64 rows."""
    longest = min(config.max_model_len, config.max_num_batched_tokens)
    most = min(config.max_num_logits, config.max_num_batched_tokens)
    steps = [[min(length, longest)] for length in (1, 2, 16, 17)]
    steps += [[1] * min(number, most) for number in (2, 3, 16, 32, 64, most)]
    if most > 1 and longest > 2:
        steps.append([1, min(longest - 1, 17)])
    return [list(counts) for counts in dict.fromkeys(map(tuple, steps))]


def steps_of_every_size(config: RunnerConfig) -> list[list[int]]:
    """Counts of prefills whose tokens double, up to all that a step can have: products of experts
    are cut into other tiles at other numbers of tokens, nowhere twice between two of these."""
    most = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
    sizes = [*itertools.takewhile(lambda size: size < most, (32 << n for n in range(32))), most]
    return [_prefills(size, config.max_model_len) for size in sizes]


def _prefills(num_tokens: int, max_model_len: int) -> list[int]:
    """As few sequences as can have `num_tokens`; the shortest first, if it is a decode."""
    full, rest = divmod(num_tokens, max_model_len)
    return [rest] * (rest > 0) + [max_model_len] * full


def largest_step(config: RunnerConfig) -> list[int]:
    """Counts of the step that takes most memory: most rows of logits, most tokens among them."""
    number = min(config.max_num_logits, config.max_num_batched_tokens)
    share, more = divmod(config.max_num_batched_tokens, number)
    counts = [share + (index < more) for index in range(number)]
    return [min(count, config.max_model_len) for count in reversed(counts)]


def changes_of_every_kind() -> RowChanges:
    """Writes to the first row what a free row holds anyway, or what is not read."""
    return RowChanges(
        rows=[RowUpdate(TOKEN_TABLE, 0, 0, [0])],
        sampling=[RowUpdate(TOKEN_TABLE, 0, StateWord.FLAGS, [int(StateFlag.GREEDY)])],
        penalties=[PenaltyRow(0, [slice(0, 1)], num_prompt_tokens=1, num_tokens=1)],
    )


def copies_of_every_kind(config: RunnerConfig) -> CacheCopies:
    """Between each pool's first block, which is still free, a host's block and the null block."""
    ids, host_ids = config.block_ids, config.host_block_ids
    has_host = host_ids.num_blocks > 0
    return CacheCopies(
        swap_in=[(host, 0) for host in host_ids.first_ids] if has_host else [],
        swap_out=list(zip(ids.first_ids, host_ids.first_ids, strict=True)) if has_host else [],
        copy=[(first, 0) for first in ids.first_ids],
    )
