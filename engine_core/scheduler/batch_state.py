"""The running sequences as flat arrays, one row each: what a step reads and changes as columns.

Owns rows and their order. Must not know blocks, queues or clients' messages. A row is a sequence's
from its admission until it is finished or preempted; the model runner uses the same number.

    row              0      1      2      3            order (of admission): 2 0 3
    num_tokens      17      .    513     20
    num_computed    16      .    256     19            row 1 is free
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine_core.scheduler.sequence import Sequence

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class BatchState:
    """
    Args:
        max_num_rows: most sequences running at once.
        max_model_len: most tokens of a sequence. Memory is touched as tokens are written.
    """

    def __init__(self, max_num_rows: int, max_model_len: int) -> None:
        self.token_ids: Int32Array = np.zeros((max_num_rows, max_model_len), np.int32)
        """[row, position]: prompt, then output."""
        self.num_tokens: Int32Array = np.zeros(max_num_rows, np.int32)
        self.num_prompt: Int32Array = np.zeros(max_num_rows, np.int32)
        self.num_computed: Int32Array = np.zeros(max_num_rows, np.int32)
        """Scheduled tokens count: a step that is planned is going to run."""
        self.num_allocated_slots: Int32Array = np.zeros(max_num_rows, np.int32)
        """Positions below it have slots; the cache is asked only beyond."""
        self.stop_length: Int32Array = np.zeros(max_num_rows, np.int32)
        """A sequence of so many tokens is over."""
        self.num_ahead: Int32Array = np.zeros(max_num_rows, np.int32)
        """Tokens behind num_tokens that open steps sample: planned for before they are known."""
        self.may_schedule_async: BoolArray = np.zeros(max_num_rows, np.bool_)
        """Whether that is done with it: the host has no part in what comes next, as it has in
        beams, and where samples are to branch off."""
        self.is_blocked: BoolArray = np.zeros(max_num_rows, np.bool_)
        """Not planned for until an open step's result is known."""
        self.num_open_steps = 0
        """Planned and not updated; where it is 0, nobody is held and nothing is ahead."""
        self.client: Int32Array = np.zeros(max_num_rows, np.int32)
        self.tenant: Int32Array = np.zeros(max_num_rows, np.int32)
        self.index: Int32Array = np.zeros(max_num_rows, np.int32)
        """Which of its request's sequences."""
        self.is_plain: BoolArray = np.zeros(max_num_rows, np.bool_)
        """Nothing is to be told of it but its next token."""
        self.arrival_s: npt.NDArray[np.float64] = np.zeros(max_num_rows, np.float64)
        self.first_token_s: npt.NDArray[np.float64] = np.zeros(max_num_rows, np.float64)
        self.generation: Int64Array = np.zeros(max_num_rows, np.int64)
        """Grows each time that a row changes hands."""
        self.sequences: list[Sequence | None] = [None] * max_num_rows
        self.drafted: set[int] = set()
        """Rows whose sequences have drafts to verify."""
        self.version = 0
        """Grows with every change of hands of any row."""
        self._free = list(range(max_num_rows - 1, -1, -1))
        self._order: Int32Array = np.zeros(0, np.int32)
        self._appended: list[int] = []
        self._has_gaps = False
        self._stale_rows: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def order(self) -> Int32Array:
        """The rows in use, in order of admission. Not to be changed."""
        if self._has_gaps:
            stays = np.ones(len(self.sequences), np.bool_)
            stays[list(self._stale_rows)] = False
            self._order = self._order[stays[self._order]]
            self._stale_rows.clear()
            self._has_gaps = False
        if self._appended:
            self._order = np.append(self._order, np.asarray(self._appended, np.int32))
            self._appended = []
        return self._order

    @property
    def schedulable(self) -> Int32Array:
        """The rows in use that may be planned for, in order. Not to be changed."""
        order = self.order
        return order[~self.is_blocked[order]] if self.num_open_steps else order

    def lengths(self, places: Int64Array) -> Int32Array:
        """Tokens of the sequences in these rows, with those that open steps sample."""
        lengths: Int32Array = self.num_tokens[places]
        return lengths + self.num_ahead[places] if self.num_open_steps else lengths

    def is_in_flight(self, row: int) -> bool:
        """Whether an open step samples its next token."""
        return bool(self.num_ahead[row]) or bool(self.is_blocked[row])

    def set_order(self, rows: list[int]) -> None:
        """The rows in use, all of them, in another order."""
        self._order = np.asarray(rows, np.int32)
        self._appended = []
        self._has_gaps = False
        self._stale_rows.clear()

    def take(self, sequence: "Sequence") -> int:
        """A free row for a sequence, the last in order. Its numbers are for the caller to set."""
        row = self._free.pop()
        if row in self._stale_rows:
            self.order  # noqa: B018  drops the row's former place first
        self.sequences[row] = sequence
        self._appended.append(row)
        self._changed(row)
        return row

    def replace(self, row: int, sequence: "Sequence") -> None:
        """The row changes hands and keeps its place in the order."""
        self.sequences[row] = sequence
        self._changed(row)

    def give_back(self, row: int) -> None:
        self.sequences[row] = None
        self._changed(row)
        self._free.append(row)
        if row in self._appended:
            self._appended.remove(row)
        else:
            self._has_gaps = True
            self._stale_rows.add(row)

    def _changed(self, row: int) -> None:
        self.generation[row] += 1
        self.version += 1

    def check(self) -> None:
        """Assert that each row is free or one sequence's, and in the order once."""
        in_use = [row for row, sequence in enumerate(self.sequences) if sequence is not None]
        assert sorted(self.order.tolist()) == in_use
        assert sorted([*in_use, *self._free]) == list(range(len(self.sequences)))
        for row in in_use:
            sequence = self.sequences[row]
            assert sequence is not None
            assert sequence.row == row
            assert self.num_computed[row] >= 0
            assert 0 <= self.num_ahead[row] <= self.num_open_steps
            assert self.num_tokens[row] + self.num_ahead[row] < self.stop_length[row] or (
                not self.num_ahead[row]
            )
            assert self.num_open_steps or not self.is_blocked[row]
            assert self.num_prompt[row] <= self.num_tokens[row] <= self.stop_length[row]
