"""The running sequences as flat arrays, one row each, which a step reads and changes as columns."""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
"""Row numbers are of this type everywhere: numpy indexes with int64 several times as fast as with
other integers."""
BoolArray = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.object_]
"""Arrays of strings: so that rows are picked as of the other columns."""


class BatchState:
    """A row is a sequence's from its admission until it is finished or preempted; the model runner
    uses the same number.

        row                   0      1      2      3        order (of admission): 2 0 3
        num_tokens           17      .    513     20
        num_computed_tokens  16      .    256     19        row 1 is free

    Args:
        max_num_rows: most sequences running at once.
        max_model_len: most tokens of a sequence. Memory is touched as tokens are written.
    """

    def __init__(self, max_num_rows: int, max_model_len: int) -> None:
        self.max_num_rows = max_num_rows
        self.token_ids: Int32Array = np.zeros((max_num_rows, max_model_len), np.int32)
        """[row, position]: prompt, then output."""
        self.num_tokens: Int32Array = np.zeros(max_num_rows, np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_rows, np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(max_num_rows, np.int32)
        """Tokens count as computed once they are scheduled."""
        self.num_allocated_slots: Int32Array = np.zeros(max_num_rows, np.int32)
        """Positions below it have slots; the cache is asked only beyond."""
        self.next_drop: Int32Array = np.zeros(max_num_rows, np.int32)
        """Computed tokens with which the sequence's next block is out of a sliding window."""
        self.max_len: Int32Array = np.zeros(max_num_rows, np.int32)
        """Length at which the sequence must stop."""
        self.num_output_placeholders: Int32Array = np.zeros(max_num_rows, np.int32)
        """Tokens behind num_tokens that steps in flight sample: scheduled before they are known."""
        self.may_schedule_async: BoolArray = np.zeros(max_num_rows, np.bool_)
        """May be scheduled before its last token is known: not beams, nor before a pending fork."""
        self.is_constrained: BoolArray = np.zeros(max_num_rows, np.bool_)
        """Follows a grammar: its next token is not chosen before its last one is known."""
        self.may_run_ahead: BoolArray = np.zeros(max_num_rows, np.bool_)
        """May decode several steps in one plan: not with stop strings, log-probabilities or a
        grammar."""
        self.is_blocked: BoolArray = np.zeros(max_num_rows, np.bool_)
        """Whether the row cannot be scheduled until the result of a step in flight is known."""
        self.num_steps_in_flight = 0
        """If 0, no row has placeholders or is blocked."""
        self.encoder_stop: Int32Array = np.zeros(max_num_rows, np.int32)
        """The position behind the last one that depends on an encoder's output; 0 for text."""
        self.client_index: Int32Array = np.zeros(max_num_rows, np.int32)
        self.tenant_number: Int32Array = np.zeros(max_num_rows, np.int32)
        self.sequence_index: Int32Array = np.zeros(max_num_rows, np.int32)
        """Number of the sequence within its request."""
        self.fast_path: BoolArray = np.zeros(max_num_rows, np.bool_)
        """Its next output is one token and nothing else."""
        self.arrival_s: npt.NDArray[np.float64] = np.zeros(max_num_rows, np.float64)
        self.first_token_s: npt.NDArray[np.float64] = np.zeros(max_num_rows, np.float64)
        self.request_ids: Ids = np.full(max_num_rows, "", object)
        self.sequence_ids: Ids = np.full(max_num_rows, "", object)
        """Ids of the rows' sequences; a free row keeps that of its last one."""
        self.rows_with_drafts: set[int] = set()
        self.generation: Int64Array = np.zeros(max_num_rows, np.int64)
        """Grows with each change of the row's owner."""
        self.version = 0
        """Grows with each change of any row's owner."""
        self._free = list(range(max_num_rows - 1, -1, -1))
        self._order: Int64Array = np.zeros(0, np.int64)
        self._appended: list[int] = []
        self._has_gaps = False
        self._stale_rows: set[int] = set()

    @property
    def order(self) -> Int64Array:
        """The rows in use, in order of admission. Not to be changed."""
        if self._has_gaps:
            stays = np.ones(self.max_num_rows, np.bool_)
            stays[list(self._stale_rows)] = False
            self._order = self._order[stays[self._order]]
            self._stale_rows.clear()
            self._has_gaps = False
        if self._appended:
            self._order = np.append(self._order, np.asarray(self._appended, np.int64))
            self._appended = []
        return self._order

    @property
    def schedulable(self) -> Int64Array:
        """The rows in use that are not blocked, in order. Not to be changed."""
        order = self.order
        return order[~self.is_blocked[order]] if self.num_steps_in_flight else order

    def lengths(self, rows: Int64Array) -> Int32Array:
        """Tokens of the sequences in these rows, placeholders included."""
        lengths: Int32Array = self.num_tokens[rows]
        if self.num_steps_in_flight:
            return lengths + self.num_output_placeholders[rows]
        return lengths

    def is_in_flight(self, row: int) -> bool:
        """Whether a step in flight samples its next token."""
        return bool(self.num_output_placeholders[row]) or bool(self.is_blocked[row])

    def set_order(self, rows: list[int]) -> None:
        """The rows in use, all of them, in another order."""
        self._order = np.asarray(rows, np.int64)
        self._appended = []
        self._has_gaps = False
        self._stale_rows.clear()

    def allocate_row(self) -> int:
        """A free row, the last in order. Its numbers are the caller's to set."""
        row = self._free.pop()
        if row in self._stale_rows:
            self.order  # noqa: B018  drops the row's former place first
        self._appended.append(row)
        self.change_owner(row)
        return row

    def change_owner(self, row: int) -> None:
        """Another sequence has the row from now on; its place in the order stays."""
        self.generation[row] += 1
        self.version += 1

    def free_row(self, row: int) -> None:
        self.change_owner(row)
        self._free.append(row)
        if row in self._appended:
            self._appended.remove(row)
        else:
            self._has_gaps = True
            self._stale_rows.add(row)

    def check(self) -> None:
        """Assert that each row is free, or in the order once and with numbers that fit together."""
        in_use = self.order.tolist()
        assert sorted([*in_use, *self._free]) == list(range(self.max_num_rows))
        for row in in_use:
            num_tokens, num_placeholders = self.num_tokens[row], self.num_output_placeholders[row]
            assert self.num_computed_tokens[row] >= 0
            assert 0 <= num_placeholders <= self.num_steps_in_flight
            assert not num_placeholders or num_tokens + num_placeholders < self.max_len[row]
            assert self.num_steps_in_flight or not self.is_blocked[row]
            assert self.num_prompt_tokens[row] <= num_tokens <= self.max_len[row]


class IdsOfRows:
    """Lists of ids for rows. Equal rows give the same list again, at the cost of a look-up: from
    step to step the batch mostly stays. The lists must not be changed.
    `ids`: `batch.sequence_ids` or `batch.request_ids`."""

    def __init__(self, batch: BatchState, ids: Ids) -> None:
        self._batch = batch
        self._ids = ids
        self._key: tuple[int, bytes] | None = None
        self._list: list[str] = []

    def of(self, rows: Int64Array) -> list[str]:
        """An id for each of these rows, all of them in use."""
        key = (self._batch.version, rows.tobytes())
        if key != self._key:
            self._list = self._ids[rows].tolist()
            self._key = key
        return self._list
