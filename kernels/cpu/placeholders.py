"""What stands for tensors while a forward pass is recorded.

Owns their memory. A placeholder knows `CpuOperations` and nothing else, so whatever else is done to
it is noticed. Must not know models.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernels.cpu.commands import CommandKind

if TYPE_CHECKING:
    from kernels.cpu.recorder import Recorder


class NotRecordable(Exception):
    """The forward pass does something that no command does."""


class Memory:
    """[capacity, size] floats; used again by a later placeholder when no one holds it any more."""

    def __init__(self, free: dict[int, list[torch.Tensor]], capacity: int, size: int) -> None:
        self._unused = free.setdefault(size, [])
        if not self._unused:
            self._unused.append(torch.empty(capacity, size, dtype=torch.float32))
        self.tensor = self._unused.pop()

    def __del__(self) -> None:
        self._unused.append(self.tensor)


class Placeholder:
    """Stands for an activation [T, *tail] while a forward pass is recorded.

    Attributes:
        stride: floats from a token's row to the next.
    """

    def __init__(
        self, recorder: Recorder, memory: Memory, tail: tuple[int, ...], stride: int
    ) -> None:
        self.recorder = recorder
        self.memory = memory
        self.tail = tail
        self.stride = stride

    @property
    def address(self) -> int:
        """Of the first token's row."""
        return self.memory.tensor.data_ptr()

    def flatten(self, start: int) -> Placeholder:
        """[T, H, D] -> [T, H * D]."""
        size = math.prod(self.tail)
        if start != 1 or self.stride != size:
            raise NotRecordable
        return Placeholder(self.recorder, self.memory, (size,), size)

    def mul_(self, factor: torch.Tensor) -> Placeholder:
        """By one number, in place."""
        if factor.numel() != 1 or self.tail != (self.stride,):
            raise NotRecordable
        return self.recorder.add(
            CommandKind.SCALE, out=self, size=self.stride, number=float(factor)
        )


class TokenIds:
    """Stands for a step's token ids."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder


class Positions:
    """Stands for a step's positions."""
