"""When the sequences of a batch got their tokens: columns by the scheduler's persistent rows.

So one step costs a few numpy operations, however many sequences run. A preempted sequence has no
row; what is known of it is parked under its id.
"""

import numpy as np

from engine_core.scheduler.step import Int32Array, ScheduledBatch


class RowTimes:
    def __init__(self, num_rows: int) -> None:
        self.token_ids = np.zeros(num_rows, np.int32)
        """What the sequence in each row samples."""
        self.longest_gap_s = np.zeros(num_rows)
        """Between two of its tokens."""
        self._last_token_s = np.full(num_rows, np.nan)
        self._num_prompt_tokens = np.zeros(num_rows, np.int32)
        self._parked: dict[str, tuple[int, float, float, int]] = {}
        self._sampled_rows: Int32Array = np.zeros(0, np.int32)
        self.num_decodes = 0
        """Of the last planned step: sequences that compute one token behind an earlier one."""

    def give(self, row: int, num_prompt_tokens: int, token_id: int) -> None:
        """A new sequence."""
        if row >= len(self.token_ids):
            self._grow(row + 1)
        self.token_ids[row] = token_id
        self.longest_gap_s[row] = 0.0
        self._last_token_s[row] = np.nan
        self._num_prompt_tokens[row] = num_prompt_tokens

    def park(self, request_id: str, row: int) -> None:
        self._parked[request_id] = (
            int(self.token_ids[row]),
            float(self.longest_gap_s[row]),
            float(self._last_token_s[row]),
            int(self._num_prompt_tokens[row]),
        )

    def give_back(self, request_id: str, row: int) -> None:
        token_id, longest_gap_s, last_token_s, num_prompt_tokens = self._parked.pop(request_id)
        self.give(row, num_prompt_tokens, token_id)
        self.longest_gap_s[row] = longest_gap_s
        self._last_token_s[row] = last_token_s

    def forget(self, request_id: str) -> None:
        """A parked sequence is over; nothing if it is not parked."""
        self._parked.pop(request_id, None)

    def planned(self, batch: ScheduledBatch, num_output_tokens: Int32Array) -> int:
        """A step is planned. Returns how many of its sequences get a token from it: those whose
        tokens are then all computed."""
        rows = batch.rows
        stop = batch.num_computed_tokens + batch.num_scheduled_tokens
        is_due = stop == self._num_prompt_tokens[rows] + num_output_tokens
        self._sampled_rows = rows[is_due]
        self.num_decodes = int(np.count_nonzero(is_due & (batch.num_scheduled_tokens == 1)))
        return len(self._sampled_rows)

    def sampled(self, now_s: float) -> None:
        """The planned step's tokens are there."""
        rows = self._sampled_rows
        gaps = now_s - self._last_token_s[rows]  # NaN before the first token: fmax ignores it
        self.longest_gap_s[rows] = np.fmax(self.longest_gap_s[rows], gaps)
        self._last_token_s[rows] = now_s

    def _grow(self, num_rows: int) -> None:
        missing = max(num_rows, 2 * len(self.token_ids)) - len(self.token_ids)
        for name in ("token_ids", "longest_gap_s", "_last_token_s", "_num_prompt_tokens"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(missing, column.dtype)]))
