"""An image or sound of a prompt, as the scheduler and the model runner know it."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MultiModalFeature:
    """The scheduler reads all but `runs` and `tensors`, which are the model runner's."""

    modality: str
    start: int
    stop: int
    """Positions [start, stop) of the prompt depend on it."""
    num_rows: int
    """Rows of its encoder's output, each in the place of one of these positions."""
    identifier: bytes
    """Names its content and those that may share its encoder's output."""
    runs: tuple[tuple[int, int], ...] = ()
    """Positions [start, stop) that take one row each, in order."""
    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arrays by transformers' names; not to be changed."""
