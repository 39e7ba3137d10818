"""What of a step is the native library's own work, and what is the host's: Python and torch.

Owns the counting of calls into the library. Must not know models.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from kernels.cpu.library import NativeLibrary
from scripts.cpu_operations.clock import clock


@dataclasses.dataclass(slots=True)
class Spent:
    """Calls of one function of the library, and their seconds."""

    calls: int = 0
    seconds: float = 0.0


class MeasuredLibrary(NativeLibrary):
    """The library, with the seconds of every call kept. A call's way through ctypes (about a
    microsecond) is counted as the library's."""

    def __init__(self, library: NativeLibrary) -> None:
        # the loaded library's own state: the same binary, the same threads
        self.__dict__.update(library.__dict__)
        self.spent: dict[str, Spent] = {}

    def function(self, name: str, *argument_types: Any) -> Callable[..., bytes | None]:
        found = super().function(name, *argument_types)
        spent = self.spent.setdefault(name, Spent())

        def measured(*arguments: object) -> bytes | None:
            begun = clock()
            refusal = found(*arguments)
            spent.seconds += clock() - begun
            spent.calls += 1
            return refusal

        return measured

    def reset(self) -> None:
        """Forget what was counted."""
        for spent in self.spent.values():
            spent.calls, spent.seconds = 0, 0.0

    def by_name(self) -> dict[str, float]:
        """Seconds in each function since the last `reset`."""
        return {name: spent.seconds for name, spent in self.spent.items()}
