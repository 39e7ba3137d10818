"""A feature is a part of each row: what it keeps of a sequence, and what it does in a step. No
runner knows a feature: it loops over the parts that its rows use, none for plain requests."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.rows import PlacedRow
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.operations import ForwardContext

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
HostTensor = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes memory on the host that the model's device copies to by itself."""


@dataclasses.dataclass(slots=True, kw_only=True)  # see SchedulerOutput
class StepRows:
    """R sequences of a step, in the order in which their tokens lie behind one another.

    Attributes:
        place_R: of each its place in the plan's order.
        rows_R: its row.
        num_computed_R: its tokens in the cache before this step.
        num_scheduled_R: its tokens in this step, at least 1.
    """

    place_R: Int64Array
    rows_R: Int64Array
    num_computed_R: Int64Array
    num_scheduled_R: Int64Array

    def offsets(self) -> Int64Array:
        """[R], where each sequence's tokens begin among the step's."""
        offset_R: Int64Array = np.cumsum(self.num_scheduled_R) - self.num_scheduled_R
        return offset_R


class StepPart:
    """What a feature does in one step; all that it does not do stays as it is here."""

    reads_all_rows = False
    """Whether it needs all hidden states of the step, not those alone that are sampled from."""
    fits_graphs = False
    """Whether a captured decode step serves it too."""
    ends_T: Int32Array | None = None
    """Behind the last position that each token sees; None: itself. One part alone has any."""
    shifts_R: Int64Array | None = None
    """What a device adds to the positions of each sequence's tokens. One part alone has any."""
    failures: Mapping[str, str] | None = None
    """Why a request cannot go on, by request."""

    def begin(self) -> None:
        """Called before the forward pass, where that is launched."""

    def in_context(self, context: ForwardContext) -> ForwardContext:
        """What the forward pass reads, with what this adds. Called where that is launched."""
        return context

    def read(self, hidden_TE: torch.Tensor) -> None:
        """Launch what brings to the host what the answer needs of the hidden states."""

    def answer(self, output: ModelRunnerOutput) -> None:
        """Add to the answer of the step, which is done."""
        output.failures.update(self.failures or {})


class RowPart:
    """A feature's part of each row: what it keeps, and its share of steps."""

    @property
    def is_used(self) -> bool:
        """Whether any row has something of it, so that steps must ask for it."""
        return True

    def place(self, placed: PlacedRow) -> None:
        """A new or resumed sequence takes a row; nothing of an earlier one is left."""

    def free(self, row: int) -> None:
        """The row's sequence is gone."""

    def update(self, plan: SchedulerOutput) -> None:
        """The plan's rows are in place; it may have no tokens."""

    def order(self, rows_R: Int64Array) -> Int64Array | None:
        """An order that it needs sequences of these rows to have; None: any."""
        return None

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> StepPart | None:
        """Its share of a step; None: nothing. Called once a step, in the order of the plans."""
        return None

    def of_dummy(self, num_tokens: int) -> StepPart | None:
        """Its share of a step for warming up, all of whose tokens use it; 0: of one in which none
        does."""
        return None


class RowParts:
    """The parts of a runner's rows."""

    def __init__(self, parts: Iterable[RowPart]) -> None:
        self._all = tuple(parts)
        self._used = tuple(part for part in self._all if part.is_used)

    def __iter__(self) -> Iterator[RowPart]:
        return iter(self._all)

    def update(
        self, plan: SchedulerOutput, freed: Sequence[int], placed: Sequence[PlacedRow]
    ) -> None:
        """Do what a plan says of rows: these are freed, then these taken."""
        for part in self._all:
            for row in freed:
                part.free(row)
            for each in placed:
                part.place(each)
            part.update(plan)
        self._used = tuple(part for part in self._all if part.is_used)

    def order(self, rows_R: Int64Array) -> Int64Array | None:
        """See `RowPart.order`."""
        for part in self._used:
            order_R = part.order(rows_R)
            if order_R is not None:
                return order_R
        return None

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> tuple[StepPart, ...]:
        """Shares that features have in a step, of those that have one."""
        parts = [part.of_step(plan, rows) for part in self._used]
        return tuple(part for part in parts if part is not None)

    def of_dummy(self, num_tokens: int) -> tuple[StepPart, ...]:
        """See `RowPart.of_dummy`."""
        parts = [part.of_dummy(num_tokens) for part in self._all]
        return tuple(part for part in parts if part is not None)
