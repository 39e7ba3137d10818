"""What is pooled of each row's prompt, a chunk at a time, for both decoders' runners."""

import dataclasses

import torch

from engine_core.model_runner.pooling import Pooler, PromptStates, named_answers
from engine_core.model_runner.row_parts import HostTensor, RowPart, StepPart, StepRows
from engine_core.model_runner.rows import PlacedRow
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput


@dataclasses.dataclass(frozen=True, slots=True)
class PooledRange:
    """Hidden states [offset, offset + count) of a step's tokens; count may be 0 with the last.

    `place`: the sequence's in the plan; `start`: the position of the first."""

    place: int
    offset: int
    start: int
    count: int
    is_last: bool
    states: PromptStates


class PooledStep(StepPart):
    """The ranges that a step pools."""

    reads_all_rows = True

    def __init__(
        self, request_ids: list[str], ranges: list[PooledRange], host_tensor: HostTensor
    ) -> None:
        self._request_ids = request_ids
        self._ranges = ranges
        self._host_tensor = host_tensor
        self._states: list[torch.Tensor] = []

    def read(self, hidden_TE: torch.Tensor) -> None:
        for part in self._ranges:
            wanted_NE = hidden_TE[part.offset : part.offset + part.count]
            host_NE = self._host_tensor(tuple(wanted_NE.shape), wanted_NE.dtype)
            self._states.append(host_NE.copy_(wanted_NE, non_blocking=True))

    def answer(self, output: ModelRunnerOutput) -> None:
        answers = {}
        for part, states_NE in zip(self._ranges, self._states, strict=True):
            if part.count:
                part.states.add(part.start, states_NE.float().numpy())
            if part.is_last:
                answers[part.place] = part.states.answer()
        output.pooled, failures = named_answers(self._request_ids, answers)
        output.failures.update(failures)


class PoolingRows(RowPart):
    """`host_tensor`: makes memory that hidden states are copied to."""

    def __init__(self, pooler: Pooler, host_tensor: HostTensor) -> None:
        self._pooler = pooler
        self._host_tensor = host_tensor
        self._states: dict[int, PromptStates] = {}

    @property
    def is_used(self) -> bool:
        return bool(self._states)

    def place(self, placed: PlacedRow) -> None:
        self.free(placed.row)
        if (params := placed.request.pooling) is not None:
            self._states[placed.row] = PromptStates(self._pooler, params, placed.token_ids)

    def free(self, row: int) -> None:
        self._states.pop(row, None)

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> PooledStep | None:
        found = []
        columns = (rows.rows_R, rows.place_R, rows.num_computed_R, rows.num_scheduled_R)
        offset_R = rows.offsets().tolist()
        for index, (row, place, start, count) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            states, stop = self._states.get(row), start + count
            if states is not None and (wanted := states.wanted(start, stop)) is not None:
                first, end = wanted
                offset, is_last = offset_R[index] + first - start, stop == states.num_tokens
                found.append(PooledRange(place, offset, first, end - first, is_last, states))
        return PooledStep(plan.batch.req_ids, found, self._host_tensor) if found else None
