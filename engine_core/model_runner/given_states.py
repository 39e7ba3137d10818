"""Hidden states that are given in place of embeddings, by row of the batch, until they
are computed: a request's own (prompt_embeds), and what an encoder makes of its inputs."""

import dataclasses

import numpy as np
import torch

from engine_core.model_runner.row_parts import Int64Array, RowPart, StepPart, StepRows
from engine_core.model_runner.rows import PlacedRow
from engine_core.scheduler import SchedulerOutput
from kernels.interface.operations import ForwardContext
from kernels.interface.special_inputs import GivenRows

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class StepStates(StepPart):
    """What is given of a step: rows of `parts`, of any floating dtype, on the host or the device,
    to the step's tokens `places`. `dtype`: the model's."""

    places: list[Int64Array]
    parts: list[torch.Tensor]
    dtype: torch.dtype

    def in_context(self, context: ForwardContext) -> ForwardContext:
        if not self.parts:
            return context
        device = context.ops.device
        places_N = torch.from_numpy(np.concatenate(self.places)).to(device, non_blocking=True)
        rows_NE = torch.cat([part_NE.to(device, self.dtype) for part_NE in self.parts])
        if (before := context.given) is not None:
            places_N = torch.cat([before.places_N, places_N])
            rows_NE = torch.cat([before.rows_NE, rows_NE])
        return dataclasses.replace(context, given=GivenRows(places_N, rows_NE))


class GivenStates(RowPart):
    """Hidden states that rows' prompts give. `dtype`: the model's."""

    def __init__(self, max_num_rows: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._parts: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._stop: Int64Array = np.zeros(max_num_rows, np.int64)
        """[row], behind the last position that is given; 0 for rows without any."""

    @property
    def is_used(self) -> bool:
        return bool(self._parts)

    def place(self, placed: PlacedRow) -> None:
        self.free(placed.row)
        for rows in placed.request.prompt_embeds:
            if rows.stop <= placed.num_computed_tokens:
                continue
            flat = np.frombuffer(rows.data, np.uint8).copy()  # torch takes no read-only memory
            states = torch.from_numpy(flat).view(_DTYPES[rows.dtype])
            self.write(placed.row, rows.start, states.view(rows.stop - rows.start, -1))

    def write(self, row: int, start: int, states_NE: torch.Tensor) -> None:
        """Positions [start, start + N) of the row's sequence, none of which was written since
        `free`. Before the step that computes the first of them.
        `states_NE`: of any floating dtype, on the host or the device."""
        self._parts.setdefault(row, []).append((start, states_NE))
        self._stop[row] = max(self._stop[row], start + len(states_NE))

    def free(self, row: int) -> None:
        self._parts.pop(row, None)
        self._stop[row] = 0

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> StepStates | None:
        """Rows that are past all of theirs are freed."""
        places: list[Int64Array] = []
        parts: list[torch.Tensor] = []
        offset_R = rows.offsets()
        for index in np.flatnonzero(self._stop[rows.rows_R]).tolist():
            row, first = int(rows.rows_R[index]), int(rows.num_computed_R[index])
            if first >= self._stop[row]:
                self.free(row)
                continue
            stop, offset = first + int(rows.num_scheduled_R[index]), int(offset_R[index])
            for start, states_NE in self._parts[row]:
                low, high = max(first, start), min(stop, start + len(states_NE))
                if low < high:
                    places.append(np.arange(low, high) - first + offset)
                    parts.append(states_NE[low - start : high - start])
        return StepStates(places, parts, self._dtype) if places else None
