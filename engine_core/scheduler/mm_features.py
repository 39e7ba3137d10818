"""An image or sound of a prompt, as the scheduler knows it."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalFeature:
    """The scheduler reads all but `data`, which is the model runner's."""

    modality: str
    start: int
    stop: int
    """Positions [start, stop) of the prompt depend on it."""
    num_rows: int
    """Of its encoder's output, each in the place of one of these positions."""
    identifier: bytes
    """Of its content, and of whom its output may be shared with."""
    data: Any = None
