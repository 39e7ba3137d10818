"""A step before it runs: the order of its entries, which are sampled, how it is launched.

order on the device   | decodes: 1 token each | all others |    within each as in the plan

An entry is a sequence; with k drafts it is k + 1 decodes, one behind the other: so a row gets the
bits that it has without drafts, and a graph holds it.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from engine_core.model_runner.drafts import VerifiedRows
from engine_core.model_runner.gpu.input_batch import GPUInputBatch, num_device_logprobs
from engine_core.model_runner.gpu.step_buckets import MAX_LONG_PREFILLS, StepBucket, StepBuckets
from engine_core.model_runner.row_parts import Int64Array, StepPart, StepRows
from engine_core.model_runner.sampler_chain import RowChain
from engine_core.scheduler import SchedulerOutput
from kernels.interface.device_steps import SamplingMode
from kernels.interface.long_prefills import is_long_prefill


@dataclasses.dataclass(slots=True, kw_only=True)  # see SchedulerOutput
class StepEntries(StepRows):
    """R entries in the order of the device. Columns: see `pack_step`; `drafts_R` is None if the
    plan has none. `num_decodes`: leading entries of one token."""

    needs_sampling_R: npt.NDArray[np.bool_]
    drafts_R: Int64Array | None
    num_decodes: int


@dataclasses.dataclass(slots=True, kw_only=True)  # see SchedulerOutput
class GPUStep(StepEntries):
    """N of the entries are sampled.

    Attributes:
        sampled_N: of each sampled entry its sequence's place in the plan's order.
        sampled_rows_N: its row.
        num_logprobs_N: what it reports, -1 for nothing.
        from_host_N: indices among the sampled whose log-probabilities the host reports.
        logprob_ids: of each of those the tokens that it names; empty: the likeliest.
        num_tokens: T.
        mode: what their sampling needs.
        bucket: of the graph that is replayed; None: launched piece by piece.
        num_long_prefills: see `AttentionMetadata`.
        is_padded: a bucket's own step, whose counts are its most: any entry may decode.
        reads_last_rows: of each entry's hidden states the last alone is read, and some have more.
        parts: what features do in it.
        shifts_R: see `pack_step`; None: there are none.
        chains: of sampled entries with llama.cpp's samplers, by index, their row, the position of
            the token to choose, the samplers. They are not part of a graph.
    """

    sampled_N: Int64Array
    sampled_rows_N: Int64Array
    num_logprobs_N: Int64Array
    from_host_N: Int64Array
    num_tokens: int
    mode: SamplingMode
    bucket: StepBucket | None
    num_long_prefills: int = 0
    is_padded: bool = False
    reads_last_rows: bool = False
    logprob_ids: tuple[tuple[int, ...], ...] = ()
    parts: tuple[StepPart, ...] = ()
    shifts_R: Int64Array | None = None
    chains: dict[int, tuple[int, int, RowChain]] = dataclasses.field(default_factory=dict)

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
    entries = _entries(plan, batch)
    parts = batch.parts.of_step(plan, entries)
    sampled_rows_N = entries.rows_R[entries.needs_sampling_R]
    num_logprobs_N = batch.num_logprobs[sampled_rows_N]
    is_from_host_N = num_logprobs_N > num_device_logprobs(vocab_size)
    if batch.logprob_ids:
        is_from_host_N |= np.isin(sampled_rows_N, list(batch.logprob_ids))
    from_host_N = np.flatnonzero(is_from_host_N)
    mode = SamplingMode.FULL if plan.token_masks else _mode_of(batch, sampled_rows_N)
    num_scheduled_R = entries.num_scheduled_R
    is_long_R = is_long_prefill(
        num_scheduled_R, entries.num_computed_R + num_scheduled_R, num_query_heads
    )
    num_tokens, num_long = int(num_scheduled_R.sum()), int(is_long_R.sum())
    has_prefills = entries.num_decodes < len(num_scheduled_R)
    reads_all_rows = any(part.reads_all_rows for part in parts)
    is_graphable = all(part.fits_graphs for part in parts) and not from_host_N.size
    if has_prefills:
        is_graphable &= mode is not SamplingMode.FULL and not reads_all_rows
        is_graphable &= num_long <= MAX_LONG_PREFILLS
    return GPUStep(
        place_R=entries.place_R,
        rows_R=entries.rows_R,
        num_computed_R=entries.num_computed_R,
        num_scheduled_R=num_scheduled_R,
        needs_sampling_R=entries.needs_sampling_R,
        drafts_R=entries.drafts_R,
        num_decodes=entries.num_decodes,
        sampled_N=entries.place_R[entries.needs_sampling_R],
        sampled_rows_N=sampled_rows_N,
        num_logprobs_N=num_logprobs_N,
        from_host_N=from_host_N,
        num_tokens=num_tokens,
        mode=mode,
        bucket=buckets.choose(len(num_scheduled_R), num_tokens) if is_graphable else None,
        num_long_prefills=num_long,
        reads_last_rows=has_prefills and not reads_all_rows,
        logprob_ids=tuple(
            batch.logprob_ids.get(row, ()) for row in sampled_rows_N[from_host_N].tolist()
        ),
        parts=parts,
        shifts_R=next((part.shifts_R for part in parts if part.shifts_R is not None), None),
        chains=_chains_of(batch, entries) if batch.chains else {},
    )


def _chains_of(batch: GPUInputBatch, entries: StepEntries) -> dict[int, tuple[int, int, RowChain]]:
    sampled_R = entries.needs_sampling_R
    rows = entries.rows_R[sampled_R].tolist()
    positions = (entries.num_computed_R + entries.num_scheduled_R)[sampled_R].tolist()
    return {
        index: (row, position, batch.chains[row])
        for index, (row, position) in enumerate(zip(rows, positions, strict=True))
        if row in batch.chains
    }


def _entries(plan: SchedulerOutput, batch: GPUInputBatch) -> StepEntries:
    scheduled = plan.batch
    place_R = num_behind_R = np.arange(len(scheduled.rows))
    counts_R, drafts_R = scheduled.num_scheduled_tokens.astype(np.int64), None
    if plan.scheduled_spec_decode_tokens:
        verified = VerifiedRows.of(plan, place_R)
        place_R, num_behind_R = verified.of_sequences(place_R), verified.offset_N
        drafts_R = verified.before_N
        counts_R = (counts_R - (verified.counts_S - 1))[place_R]
        assert (counts_R[num_behind_R > 0] == 1).all(), "drafts behind a chunk of a prompt"
    is_other = counts_R != 1
    order = batch.parts.order(scheduled.rows[place_R])
    if order is None:
        order = np.argsort(is_other, kind="stable")
    else:  # within decodes and within others it stays
        order = order[np.argsort(is_other[order], kind="stable")]
    place_R = place_R[order]
    rows_R = scheduled.rows[place_R]
    num_computed_R = scheduled.num_computed_tokens[place_R].astype(np.int64)
    num_scheduled_R = counts_R[order]
    num_known_R = batch.num_tokens[rows_R]
    if drafts_R is not None:
        drafts_R, num_behind_R = drafts_R[order], num_behind_R[order]
        num_computed_R += num_behind_R
        num_known_R += num_behind_R
    return StepEntries(
        place_R=place_R,
        rows_R=rows_R,
        num_computed_R=num_computed_R,
        num_scheduled_R=num_scheduled_R,
        needs_sampling_R=num_computed_R + num_scheduled_R == num_known_R,
        drafts_R=drafts_R,
        num_decodes=len(order) - int(is_other.sum()),
    )


def _mode_of(batch: GPUInputBatch, sampled_rows_N: Int64Array) -> SamplingMode:
    is_below_min = batch.num_tokens[sampled_rows_N] < batch.min_length[sampled_rows_N]
    if batch.needs_full[sampled_rows_N].any() or is_below_min.any():
        return SamplingMode.FULL
    if batch.is_truncated[sampled_rows_N].any():
        return SamplingMode.TRUNCATED
    return SamplingMode.PLAIN
