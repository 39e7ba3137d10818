"""Drafts of a step: the rows of logits that verify them, and which of them are accepted.

tokens of a sequence   ... t4 | d5 d6 d7      t4 was sampled before, d5 to d7 are drafts
rows of logits             s5   s6 s7 s8      sampled from: row i stands behind t4, d5, ...
accepted                   s5 == d5, then s6 == d6, then s7 != d7: the step gives s5 s6 s7"""

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine_core.scheduler import SchedulerOutput

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def num_drafts_of(plan: SchedulerOutput) -> Int64Array:
    """[R], drafts of each sequence of the plan, in its order."""
    drafts = plan.scheduled_spec_decode_tokens
    return np.array([len(drafts.get(name, ())) for name in plan.batch.req_ids], np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class VerifiedRows:
    """The N rows of logits of S sampled sequences, in the order of these, one more than drafts of
    each. A draft is accepted if and only if it is the token that is sampled at its position, by the
    rules of a sequence that goes on with the drafts before it.

    Attributes:
        start_S: first row of logits of each sequence.
        counts_S: rows of each.
        offset_N: drafts before each row of logits.
        before_N: the last of these; not meant where there are none.
    """

    start_S: Int64Array
    counts_S: Int64Array
    offset_N: Int64Array
    before_N: Int64Array

    @classmethod
    def of(cls, plan: SchedulerOutput, place_S: Int64Array) -> "VerifiedRows":
        """`place_S`: of each sampled sequence its place in the plan."""
        drafts, names = plan.scheduled_spec_decode_tokens, plan.batch.req_ids
        counts_S = 1 + num_drafts_of(plan)[place_S]
        start_S = np.cumsum(counts_S) - counts_S
        offset_N = np.arange(counts_S.sum()) - np.repeat(start_S, counts_S)
        before_N = np.full(len(offset_N), -1, np.int64)
        for at in np.flatnonzero(counts_S > 1).tolist():
            before_N[start_S[at] + 1 : start_S[at] + counts_S[at]] = drafts[names[place_S[at]]]
        return cls(start_S, counts_S, offset_N, before_N)

    def of_sequences(self, values_S: Int64Array) -> Int64Array:
        """Each sequence's value for each of its rows of logits, [N]."""
        return np.repeat(values_S, self.counts_S)

    def drafts_before(self) -> dict[int, list[int]]:
        """By row of logits the drafts before it, in order; not of rows without any."""
        before = self.before_N.tolist()
        return {
            index: before[index - offset + 1 : index + 1]
            for index, offset in enumerate(self.offset_N.tolist())
            if offset
        }

    def taken(self, chosen_N: npt.NDArray[np.integer], failed: Iterable[int]) -> BoolArray:
        """Which of the chosen tokens the sequences get, [N]: accepted drafts and one token more.
        A row of logits that failed gives none, nor do those behind it."""
        goes_on_N = self.offset_N == 0
        goes_on_N[1:] |= chosen_N[:-1] == self.before_N[1:]
        goes_on_N[list(failed)] = False
        num_breaks_N = np.cumsum(~goes_on_N)
        before_S = num_breaks_N[self.start_S] - ~goes_on_N[self.start_S]
        taken: BoolArray = num_breaks_N == np.repeat(before_S, self.counts_S)
        return taken
