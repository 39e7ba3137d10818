"""When the sequences of a batch got their tokens: columns by the scheduler's persistent rows.

So one step costs a few numpy operations, however many sequences run. A preempted sequence has no
row; what is known of it is parked under its id.
"""

import numpy as np

from engine_core.scheduler.batch_state import BoolArray, Int64Array
from engine_core.scheduler.plan import Int32Array, ScheduledBatch


class RowTimes:
    def __init__(self, num_rows: int) -> None:
        self.token_ids = np.zeros(num_rows, np.int32)
        """What the sequence in each row samples."""
        self.longest_gap_s = np.zeros(num_rows)
        """Between two of its tokens."""
        self._last_token_s = np.full(num_rows, np.nan)
        self._num_prompt_tokens = np.zeros(num_rows, np.int32)
        self._parked: dict[str, tuple[int, float, float, int]] = {}
        self._places: Int64Array = np.zeros(0, np.int64)
        """Rows of the last planned step; by 64-bit numbers numpy looks up several times as fast."""
        self._sampled_places = self._places
        self._counts: Int32Array = np.zeros(0, np.int32)
        self._is_due: BoolArray = np.zeros(0, np.bool_)

    def num_decodes(self) -> int:
        """Of the last planned step: sequences that compute one token behind an earlier one."""
        return int(np.count_nonzero(self._is_due & (self._counts == 1)))

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
        self._places = places = batch.rows.astype(np.int64)
        stop = batch.num_computed_tokens + batch.num_scheduled_tokens
        needs_sampling = stop == self._num_prompt_tokens[places] + num_output_tokens
        self._counts, self._is_due = batch.num_scheduled_tokens, needs_sampling
        num_due = int(np.count_nonzero(needs_sampling))
        self._sampled_places = places if num_due == len(places) else places[needs_sampling]
        return num_due

    def sampled(self, now_s: float) -> Int32Array:
        """The planned step's tokens are there. Returns one for each sequence of its batch."""
        places = self._sampled_places
        gaps = now_s - self._last_token_s[places]  # NaN before the first token: fmax ignores it
        self.longest_gap_s[places] = np.fmax(self.longest_gap_s[places], gaps)
        self._last_token_s[places] = now_s
        return self.token_ids[self._places]

    def _grow(self, num_rows: int) -> None:
        missing = max(num_rows, 2 * len(self.token_ids)) - len(self.token_ids)
        for name in ("token_ids", "longest_gap_s", "_last_token_s", "_num_prompt_tokens"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(missing, column.dtype)]))
