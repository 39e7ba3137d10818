"""Low-rank adapters (LoRA, arXiv:2106.09685) beside dense products, many in one step:

out[t] += B[slot(t)] (A[slot(t)] x[t])      in float32; an adapter's scale is part of its B
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LoRAPart:
    """What an adapter adds to one projection.

    Attributes:
        a_RE: float32 [rank, inputs], contiguous, in host memory.
        b_NR: float32 [outputs, rank], likewise; the scale is multiplied in.
    """

    a_RE: torch.Tensor
    b_NR: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a_RE.shape[0]


class LoRAStack(Protocol):
    """The adapters of one fused product, by slot. Made by `LoRARows.make_stack`."""

    def prepare(self, parts: Mapping[int, LoRAPart]) -> object:
        """What `place` takes: weights in the backend's layout, in host memory. Any thread may call.
        `parts`: by their place among the product's parts; those that are not there add nothing."""

    def place(self, slot: int, prepared: object | None) -> None:
        """Fill a slot that no row has, or empty it; between two steps."""


class LoRARows(Protocol):
    """Which adapter each token of a step has: one object for all stacks and steps."""

    def begin_step(self, slots_T: Int32Array | None) -> None:
        """Of the next forward pass, behind whatever is launched already.
        `slots_T`: each token's slot, -1 for none; tokens of a slot follow one another. None: no
        token has one, and `Operations.add_lora` launches nothing."""

    def make_stack(self, num_inputs: int, part_sizes: Sequence[int]) -> LoRAStack:
        """Empty. `part_sizes`: outputs of the projections that lie side by side in the product."""


def segments_of(slots_T: Int32Array | None) -> list[tuple[int, int, int]]:
    """(slot, start, stop) of each run of tokens that has an adapter."""
    if slots_T is None or not len(slots_T):
        return []
    bounds = np.flatnonzero(np.diff(slots_T)) + 1
    starts = [0, *bounds.tolist()]
    stops = [*starts[1:], len(slots_T)]
    runs = zip(slots_T[starts].tolist(), starts, stops, strict=True)
    return [run for run in runs if run[0] >= 0]
