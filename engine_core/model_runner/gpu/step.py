"""What a step is, before anything runs: the order of its sequences, who is due, how it is launched.

Owns these decisions as pure functions of the plan's columns and the host's rows. Must not know the
device, graphs or the model.

    order on the device   | decodes: 1 token each | all others |    within each as in the plan
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine_core.model_runner.gpu.buckets import choose_bucket
from engine_core.model_runner.gpu.packed_sampling_params import num_device_logprobs
from engine_core.model_runner.gpu.rows import HostRows
from engine_core.scheduler.plan import ScheduledBatch
from kernels.interface.device_steps import SamplingMode

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """R sequences in the order of the device, N of them due.

    Attributes:
        rows_R, num_computed_R, num_scheduled_R, is_due_R: columns, see `pack_step`.
        due_N: of each due sequence its place in the plan's order.
        due_rows_N: its row.
        num_logprobs_N: what it reports, -1 for nothing.
        from_host_N: indices among the due whose log-probabilities the host reports.
        num_tokens: T.
        num_decodes: leading sequences of one token.
        mode: how the due are sampled.
        bucket: sequences of the graph that is replayed; None: launched piece by piece.
    """

    rows_R: Int64Array
    num_computed_R: Int64Array
    num_scheduled_R: Int64Array
    is_due_R: npt.NDArray[np.bool_]
    due_N: Int64Array
    due_rows_N: Int64Array
    num_logprobs_N: Int64Array
    from_host_N: Int64Array
    num_tokens: int
    num_decodes: int
    mode: SamplingMode
    bucket: int | None

    @property
    def has_reports(self) -> bool:
        """Whether the device reports log-probabilities of anyone."""
        return int((self.num_logprobs_N >= 0).sum()) > len(self.from_host_N)


def shape_step(
    batch: ScheduledBatch, rows: HostRows, *, buckets: Sequence[int], vocab_size: int
) -> Step:
    """
    Args:
        batch: of the plan; at least one sequence.
        rows: the plan's changes are in them.
        buckets: that graphs may be used for; none if empty.
    """
    is_other = batch.num_scheduled_tokens != 1
    order = np.argsort(is_other, kind="stable")
    rows_R = batch.rows[order].astype(np.int64)
    num_computed_R = batch.num_computed_tokens[order].astype(np.int64)
    num_scheduled_R = batch.num_scheduled_tokens[order].astype(np.int64)
    is_due_R = num_computed_R + num_scheduled_R == rows.num_tokens[rows_R]
    due_rows_N = rows_R[is_due_R]
    num_logprobs_N = rows.num_logprobs[due_rows_N]
    from_host_N = np.flatnonzero(num_logprobs_N > num_device_logprobs(vocab_size))
    num_decodes = len(order) - int(is_other.sum())
    is_graphable = num_decodes == len(order) and not from_host_N.size
    return Step(
        rows_R=rows_R,
        num_computed_R=num_computed_R,
        num_scheduled_R=num_scheduled_R,
        is_due_R=is_due_R,
        due_N=order[is_due_R],
        due_rows_N=due_rows_N,
        num_logprobs_N=num_logprobs_N,
        from_host_N=from_host_N,
        num_tokens=int(num_scheduled_R.sum()),
        num_decodes=num_decodes,
        mode=_mode_of(rows, due_rows_N),
        bucket=choose_bucket(buckets, len(order)) if is_graphable else None,
    )


def _mode_of(rows: HostRows, due_rows_N: Int64Array) -> SamplingMode:
    is_held_back = rows.num_tokens[due_rows_N] < rows.held_back_until[due_rows_N]
    if rows.needs_full[due_rows_N].any() or is_held_back.any():
        return SamplingMode.FULL
    if rows.is_truncated[due_rows_N].any():
        return SamplingMode.TRUNCATED
    return SamplingMode.PLAIN
