"""A step before it runs: the order of its entries, which are sampled, how it is launched.

order on the device   | decodes: 1 token each | all others |    within each as in the plan

An entry is a sequence; with k drafts it is k + 1 decodes, one behind the other: so a row gets the
bits that it has without drafts, and a graph holds it.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from engine_core.model_runner.drafts import VerifiedRows
from engine_core.model_runner.given_states import StepStates
from engine_core.model_runner.gpu.input_batch import GPUInputBatch, num_device_logprobs
from engine_core.model_runner.gpu.step_buckets import MAX_LONG_PREFILLS, StepBucket, StepBuckets
from engine_core.model_runner.pooling import PooledRange
from engine_core.model_runner.prompt_logprobs import PromptRange
from engine_core.scheduler import SchedulerOutput
from kernels.interface.device_steps import SamplingMode
from kernels.interface.long_prefills import is_long_prefill

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPUStep:
    """R entries in the order of the device, N of which are sampled.

    Attributes:
        rows_R, num_computed_R, num_scheduled_R, needs_sampling_R: columns, see `pack_step`.
        drafts_R: likewise; None if the plan has none.
        sampled_N: of each sampled entry its sequence's place in the plan's order.
        sampled_rows_N: its row.
        num_logprobs_N: what it reports, -1 for nothing.
        from_host_N: indices among the sampled whose log-probabilities the host reports.
        logprob_ids: of each of those the tokens that it names; empty: the likeliest.
        prompt_ranges: of prompts that are reported; `index` is the place in the plan's order.
        pooled_ranges: likewise, of prompts that are pooled.
        num_tokens: T.
        num_decodes: leading entries of one token.
        mode: what their sampling needs.
        given: hidden states in place of embeddings.
        bucket: of the graph that is replayed; None: launched piece by piece.
        num_long_prefills: see `AttentionMetadata`.
        is_padded: a bucket's own step, whose counts are its most: any entry may decode.
        reads_last_rows: of each entry's hidden states the last alone is read, and some have more.
            Not with adapters, whose products know the rows of all tokens.
    """

    rows_R: Int64Array
    num_computed_R: Int64Array
    num_scheduled_R: Int64Array
    needs_sampling_R: npt.NDArray[np.bool_]
    drafts_R: Int64Array | None
    sampled_N: Int64Array
    sampled_rows_N: Int64Array
    num_logprobs_N: Int64Array
    from_host_N: Int64Array
    num_tokens: int
    num_decodes: int
    mode: SamplingMode
    bucket: StepBucket | None
    num_long_prefills: int = 0
    is_padded: bool = False
    reads_last_rows: bool = False
    logprob_ids: tuple[tuple[int, ...], ...] = ()
    prompt_ranges: tuple[PromptRange, ...] = ()
    pooled_ranges: tuple[PooledRange, ...] = ()
    given: StepStates | None = None

    @property
    def has_reports(self) -> bool:
        """Whether the device reports log-probabilities."""
        return int((self.num_logprobs_N >= 0).sum()) > len(self.from_host_N)


def arrange_step(
    plan: SchedulerOutput,
    batch: GPUInputBatch,
    *,
    buckets: StepBuckets,
    vocab_size: int,
    num_query_heads: int,
) -> GPUStep:
    """
    Args:
        plan: of at least one sequence.
        batch: the plan's changes are in it.
        buckets: that graphs may be used for.
    """
    scheduled = plan.batch
    place_R = num_behind_R = np.arange(len(scheduled.rows))
    counts_R, drafts_R = scheduled.num_scheduled_tokens.astype(np.int64), None
    if plan.scheduled_spec_decode_tokens:
        entries = VerifiedRows.of(plan, place_R)
        place_R, num_behind_R = entries.of_sequences(place_R), entries.offset_N
        drafts_R = entries.before_N
        counts_R = (counts_R - (entries.counts_S - 1))[place_R]
        assert (counts_R[num_behind_R > 0] == 1).all(), "drafts behind a chunk of a prompt"
    is_other = counts_R != 1
    slots_R = batch.adapters.slots(scheduled.rows)
    # tokens of an adapter together; both sorts keep the order of equals
    order = (
        np.argsort(is_other, kind="stable")
        if slots_R is None
        else np.lexsort((slots_R[place_R], is_other))
    )
    place_R = place_R[order]
    rows_R = scheduled.rows[place_R]
    num_computed_R = scheduled.num_computed_tokens[place_R].astype(np.int64)
    num_scheduled_R = counts_R[order]
    num_known_R = batch.num_tokens[rows_R]
    if drafts_R is not None:
        drafts_R, num_behind_R = drafts_R[order], num_behind_R[order]
        num_computed_R += num_behind_R
        num_known_R += num_behind_R
    needs_sampling_R = num_computed_R + num_scheduled_R == num_known_R
    sampled_rows_N = rows_R[needs_sampling_R]
    num_logprobs_N = batch.num_logprobs[sampled_rows_N]
    from_host_N = num_logprobs_N > num_device_logprobs(vocab_size)
    if batch.logprob_ids:
        from_host_N |= np.isin(sampled_rows_N, list(batch.logprob_ids))
    from_host_N = np.flatnonzero(from_host_N)
    num_decodes = len(order) - int(is_other.sum())
    prompt_ranges = batch.prompts.ranges(rows_R, num_computed_R, num_scheduled_R)
    pooled_ranges = batch.pooling.ranges(rows_R, num_computed_R, num_scheduled_R)
    given = batch.given.of_step(rows_R, num_computed_R, num_scheduled_R)
    mode = SamplingMode.FULL if plan.token_masks else _mode_of(batch, sampled_rows_N)
    is_long_R = is_long_prefill(num_scheduled_R, num_computed_R + num_scheduled_R, num_query_heads)
    num_tokens, num_long = int(num_scheduled_R.sum()), int(is_long_R.sum())
    reads_all_rows = bool(prompt_ranges or pooled_ranges)
    is_graphable = given is None and not from_host_N.size and not reads_all_rows
    has_prefills = num_decodes < len(order)
    if has_prefills:
        is_graphable &= mode is not SamplingMode.FULL and slots_R is None
        is_graphable &= num_long <= MAX_LONG_PREFILLS
    return GPUStep(
        rows_R=rows_R,
        num_computed_R=num_computed_R,
        num_scheduled_R=num_scheduled_R,
        needs_sampling_R=needs_sampling_R,
        drafts_R=drafts_R,
        sampled_N=place_R[needs_sampling_R],
        sampled_rows_N=sampled_rows_N,
        num_logprobs_N=num_logprobs_N,
        from_host_N=from_host_N,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        mode=mode,
        bucket=buckets.choose(len(order), num_tokens) if is_graphable else None,
        num_long_prefills=num_long,
        reads_last_rows=has_prefills and slots_R is None and not reads_all_rows,
        logprob_ids=tuple(
            batch.logprob_ids.get(row, ()) for row in sampled_rows_N[from_host_N].tolist()
        ),
        given=given,
        prompt_ranges=tuple(
            dataclasses.replace(part, index=int(place_R[part.index])) for part in prompt_ranges
        ),
        pooled_ranges=tuple(
            dataclasses.replace(part, index=int(place_R[part.index])) for part in pooled_ranges
        ),
    )


def _mode_of(batch: GPUInputBatch, sampled_rows_N: Int64Array) -> SamplingMode:
    is_below_min = batch.num_tokens[sampled_rows_N] < batch.min_length[sampled_rows_N]
    if batch.needs_full[sampled_rows_N].any() or is_below_min.any():
        return SamplingMode.FULL
    if batch.is_truncated[sampled_rows_N].any():
        return SamplingMode.TRUNCATED
    return SamplingMode.PLAIN
