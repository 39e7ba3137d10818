"""The adapter of each row of a runner's batch."""

import numpy as np
import numpy.typing as npt

from engine_core.adapters.pool import AdapterPool
from engine_core.model_runner.row_parts import Int32Array, Int64Array, RowPart, StepPart, StepRows
from engine_core.model_runner.rows import PlacedRow
from engine_core.scheduler import SchedulerOutput

_NONE = -1


class AdapterStep(StepPart):
    """`slots_T`: of each token; None: none has an adapter."""

    fits_graphs = True

    def __init__(self, pool: AdapterPool, slots_T: Int32Array | None) -> None:
        self._pool = pool
        self._slots_T = slots_T
        self.reads_all_rows = slots_T is not None  # products know the rows of all tokens

    def begin(self) -> None:
        self._pool.rows.begin_step(self._slots_T)


class AdapterRows(RowPart):
    """A row's adapter keeps its slot while the row is taken. A part of every step: the one before
    may have had adapters."""

    def __init__(self, pool: AdapterPool, *, num_rows: int) -> None:
        self._pool = pool
        self._slot_of_row = np.full(num_rows, _NONE, np.int32)

    def place(self, placed: PlacedRow) -> None:
        adapter = placed.request.adapter
        self._slot_of_row[placed.row] = _NONE if adapter is None else self._pool.slot_of[adapter]

    def free(self, row: int) -> None:
        self._slot_of_row[row] = _NONE

    def order(self, rows_R: Int64Array) -> Int64Array | None:
        """Rows of an adapter follow one another; None: no row has one."""
        slots_R = self._slot_of_row[rows_R]
        return np.argsort(slots_R, kind="stable") if (slots_R != _NONE).any() else None

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> StepPart:
        return self.of_rows(rows.rows_R, rows.num_scheduled_R)

    def of_rows(self, rows_R: Int64Array, num_tokens_R: npt.NDArray[np.integer]) -> StepPart:
        """The share of a pass over so many tokens of each row."""
        slots_R = self._slot_of_row[rows_R]
        has_any = bool((slots_R != _NONE).any())
        return AdapterStep(self._pool, np.repeat(slots_R, num_tokens_R) if has_any else None)

    def of_dummy(self, num_tokens: int) -> StepPart:
        """The share of a warm-up pass whose tokens all have the adapter of the first slot."""
        return AdapterStep(self._pool, np.zeros(num_tokens, np.int32) if num_tokens else None)
