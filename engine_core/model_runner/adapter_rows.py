"""Which adapter each row of a runner's batch has."""

import numpy as np
import numpy.typing as npt

from engine_core.adapters.pool import AdapterPool

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NONE = -1


class AdapterRows:
    """`pool` None: no row ever has one. A row's adapter keeps its slot while the row is taken."""

    def __init__(self, pool: AdapterPool | None, *, num_rows: int) -> None:
        self._pool = pool
        self._slot_of_row = np.full(num_rows, _NONE, np.int32)

    def write_row(self, row: int, adapter: str | None) -> None:
        """`adapter`: its fingerprint."""
        if self._pool is not None:
            self._slot_of_row[row] = _NONE if adapter is None else self._pool.slot_of[adapter]

    def free_row(self, row: int) -> None:
        self._slot_of_row[row] = _NONE

    def slots(self, rows_R: Int64Array) -> Int32Array | None:
        """Of each row; None: no row has an adapter."""
        slots_R = self._slot_of_row[rows_R]
        return slots_R if self._pool is not None and bool((slots_R != _NONE).any()) else None

    def order(self, rows_R: Int64Array) -> Int64Array | None:
        """An order in which rows of an adapter follow one another; None: no row has one."""
        slots_R = self.slots(rows_R)
        return None if slots_R is None else np.argsort(slots_R, kind="stable")

    def begin_step(self, slots_T: Int32Array | None) -> None:
        """Before the forward pass over tokens of these slots."""
        if self._pool is not None:
            self._pool.rows.begin_step(slots_T)

    def of_tokens(
        self, rows_R: Int64Array, num_tokens_R: npt.NDArray[np.integer]
    ) -> Int32Array | None:
        """The slot of each token, so many of each row; None: no row has an adapter."""
        slots_R = self.slots(rows_R)
        return None if slots_R is None else np.repeat(slots_R, num_tokens_R)

    def of_dummy(self, num_tokens: int) -> Int32Array | None:
        """As if all tokens had the adapter of the first slot; None: there are no adapters."""
        return None if self._pool is None else np.zeros(num_tokens, np.int32)
