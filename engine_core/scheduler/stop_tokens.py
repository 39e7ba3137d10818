"""Which token ids may end a running sequence: one look into a table for a whole step's tokens.

Knows ids and counts, not sequences: who is hit is checked one by one (`stop_check`).
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class StopTokens:
    """The union of the stop tokens of all running sequences."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._table: npt.NDArray[np.bool_] = np.zeros(1, np.bool_)

    @property
    def is_empty(self) -> bool:
        """Whether no token ends any sequence."""
        return not self._counts

    def add(self, token_ids: Iterable[int]) -> None:
        """One more sequence stops at each of these."""
        for token_id in token_ids:
            self._counts[token_id] += 1
            if token_id + 1 >= len(self._table):
                # the last entry stands for all ids beyond the table, and is false
                table = np.zeros(2 * token_id + 2, np.bool_)
                table[: len(self._table)] = self._table
                self._table = table
            self._table[token_id] = True

    def remove(self, token_ids: Iterable[int]) -> None:
        """One sequence less stops at each of these."""
        for token_id in token_ids:
            self._counts[token_id] -= 1
            if not self._counts[token_id]:
                del self._counts[token_id]
                self._table[token_id] = False

    def hit_by(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """For each token whether it may end a sequence."""
        return self._table[np.minimum(token_ids, len(self._table) - 1)]
