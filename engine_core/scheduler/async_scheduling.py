"""What may be planned behind a step whose result is not known yet.

Owns the columns `num_ahead` and `is_blocked` of the rows. Must not know budgets or blocks. With two
steps in flight, of one sequence:

    host     plan n       plan n+1     take in n      plan n+2     take in n+1
             computes a   computes b   b is known     computes c   c is known
    device     [ a: samples b ][ b: samples c ][ c: samples d ] ...

When step n+1 is planned b is no number yet: it is one token more to compute, with a slot of its
own (`num_ahead`), and the device passes it on. So the next step of a sequence that is due needs
only that there is one. Where that is not sure, or the host has a part in what it computes, the
sequence is held until the result is known: at its last token by length, with drafts to verify, for
beams, and before samples branch off. What ends at b (end-of-sequence, abort) is computed once in
vain: its row has changed hands by then, and what comes back for it is dropped. A prompt that goes
on needs no result and is neither.
"""

import dataclasses

import numpy as np

from engine_core.scheduler.batch_state import BatchState, BoolArray, Int64Array
from engine_core.scheduler.plan import SchedulerOutput


class PlacedRows:
    """Some rows as they are given out at this moment.

    Args:
        places: row numbers; numpy looks up by 64-bit ones several times as fast as by others.
    """

    __slots__ = ("_version", "generations", "places", "rows")

    def __init__(self, rows: BatchState, places: Int64Array) -> None:
        self.rows = rows
        self.places = places
        self.generations: Int64Array = rows.generation[places]
        """A row has changed hands since if this is no longer its generation."""
        self._version = rows.version

    @property
    def all_unchanged(self) -> bool:
        """True only if none has changed hands; at the cost of a look."""
        return self._version == self.rows.version

    def unchanged(self) -> BoolArray:
        """Which have not changed hands."""
        unchanged: BoolArray = self.rows.generation[self.places] == self.generations
        return unchanged

    def unchanged_places(self) -> Int64Array:
        return self.places if self.all_unchanged else self.places[self.unchanged()]


@dataclasses.dataclass(frozen=True, slots=True)
class AsyncScheduling:
    """What one open step lets the next ones do with its sequences."""

    ahead: PlacedRows
    """One token more each, which this step samples."""
    held: PlacedRows | None
    """Not to be planned for until this step's result is known. None for nobody."""

    @classmethod
    def behind(
        cls, plan: SchedulerOutput, batch: PlacedRows, needs_sampling: BoolArray
    ) -> "AsyncScheduling":
        """Marks the rows of a plan that is open from now on.

        Args:
            needs_sampling: which of the batch get a token.
        """
        rows, places = batch.rows, batch.places
        may_schedule_async = rows.may_schedule_async[places]
        is_ahead = rows.lengths(places) + 1 < rows.stop_length[places]
        is_ahead &= may_schedule_async
        is_ahead &= needs_sampling
        drafts = plan.scheduled_spec_decode_tokens
        if drafts:
            is_ahead &= np.array([name not in drafts for name in plan.batch.req_ids])
        ahead, held = batch, None
        if np.count_nonzero(is_ahead) < len(places):
            ahead = PlacedRows(rows, places[is_ahead])
            is_blocked = (needs_sampling | ~may_schedule_async) & ~is_ahead
            held = PlacedRows(rows, _with_siblings(rows, places[is_blocked]))
            rows.is_blocked[held.places] = True
        rows.num_ahead[ahead.places] += 1
        return cls(ahead, held)

    def release(self) -> None:
        """The step's result is here, or will never be."""
        rows = self.ahead.rows
        rows.num_ahead[self.ahead.unchanged_places()] -= 1
        if self.held is not None:
            rows.is_blocked[self.held.unchanged_places()] = False


def _with_siblings(rows: BatchState, held: Int64Array) -> Int64Array:
    """Beams advance together: while one is held, all are."""
    beams = held[~rows.may_schedule_async[held]]
    if not len(beams):
        return held
    places = set(held.tolist())
    for place in beams.tolist():
        sequence = rows.sequences[place]
        assert sequence is not None
        places.update(seq.row for seq in sequence.request.unfinished if seq.row is not None)
    return np.array(sorted(places), np.int64)
