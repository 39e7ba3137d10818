"""Which adapter each row of a runner's batch has."""

import numpy as np
import numpy.typing as npt

from engine_core.adapters.pool import AdapterPool

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

    def order(self, rows_R: Int64Array) -> Int64Array | None:
        """An order in which rows of an adapter follow one another; None: no row has one."""
        if self._pool is None:
            return None
        slots_R = self._slot_of_row[rows_R]
        if not (slots_R != _NONE).any():
            return None
        return np.argsort(slots_R, kind="stable")

    def begin_step(self, rows_R: Int64Array, num_tokens_R: npt.NDArray[np.integer]) -> bool:
        """Before the forward pass over so many tokens of each row. Whether any has an adapter."""
        if self._pool is None:
            return False
        slots_R = self._slot_of_row[rows_R]
        has_some = bool((slots_R != _NONE).any())
        self._pool.rows.begin_step(np.repeat(slots_R, num_tokens_R) if has_some else None)
        return has_some
