"""Hidden states that are given in place of embeddings, by row of the batch, until they
are computed: a request's own (prompt_embeds), and what an encoder makes of its inputs."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.rows import PlacedRow
from kernels.interface.given_rows import GivenRows

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class StepStates:
    """What is given of a step: `parts`, one behind the other, are of tokens `places_N`."""

    places_N: Int64Array
    parts: list[torch.Tensor]

    @staticmethod
    def joined(parts: Iterable["StepStates | None"]) -> "StepStates | None":
        """Of one step, from several sources."""
        found = [part for part in parts if part is not None]
        if len(found) <= 1:
            return found[0] if found else None
        places_N = np.concatenate([part.places_N for part in found])
        return StepStates(places_N, [rows_NE for part in found for rows_NE in part.parts])

    def on_device(self, dtype: torch.dtype, device: torch.device) -> GivenRows:
        """Called where the step is launched: its stream must have made or waited for the parts."""
        rows_NE = torch.cat([part_NE.to(device, dtype) for part_NE in self.parts])
        return GivenRows(torch.from_numpy(self.places_N).to(device), rows_NE)


class GivenStates:
    """For `max_num_rows` rows."""

    def __init__(self, max_num_rows: int) -> None:
        self._parts: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._stop: Int64Array = np.zeros(max_num_rows, np.int64)
        """[row], behind the last position that is given; 0 for rows without any."""

    def place(self, placed: PlacedRow) -> None:
        """A new or resumed sequence takes a row, with what its request gives."""
        self.free_row(placed.row)
        for rows in placed.prompt_embeds:
            if rows.stop <= placed.num_computed_tokens:
                continue
            flat = np.frombuffer(rows.data, np.uint8).copy()  # torch takes no read-only memory
            states = torch.from_numpy(flat).view(_DTYPES[rows.dtype])
            self.write(placed.row, rows.start, states.view(rows.stop - rows.start, -1))

    def write(self, row: int, start: int, states_NE: torch.Tensor) -> None:
        """Positions [start, start + N) of the row's sequence, none of which was written since
        `free_row`. Before the step that computes the first of them.
        `states_NE`: of any floating dtype, on the host or the device."""
        self._parts.setdefault(row, []).append((start, states_NE))
        self._stop[row] = max(self._stop[row], start + len(states_NE))

    def free_row(self, row: int) -> None:
        """What was written there is forgotten."""
        self._parts.pop(row, None)
        self._stop[row] = 0

    def of_step(
        self,
        rows_R: Int64Array,
        num_computed_R: npt.NDArray[np.integer],
        num_scheduled_R: npt.NDArray[np.integer],
    ) -> StepStates | None:
        """What a step computes of them. Its tokens lie in the order of its sequences. Rows that are
        past all of theirs are freed."""
        if not self._parts:
            return None
        offset_R = np.cumsum(num_scheduled_R) - num_scheduled_R
        places: list[Int64Array] = []
        parts: list[torch.Tensor] = []
        for index in np.flatnonzero(self._stop[rows_R]).tolist():
            row, first = int(rows_R[index]), int(num_computed_R[index])
            if first >= self._stop[row]:
                self.free_row(row)
                continue
            stop, offset = first + int(num_scheduled_R[index]), int(offset_R[index])
            for start, states_NE in self._parts[row]:
                low, high = max(first, start), min(stop, start + len(states_NE))
                if low < high:
                    places.append(np.arange(low, high) - first + offset)
                    parts.append(states_NE[low - start : high - start])
        return StepStates(np.concatenate(places), parts) if places else None
