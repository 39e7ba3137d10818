"""How weights get from host memory into a model's own tensors. A GPU copies at full speed, and
while the host goes on, only from page-locked memory, which mapped files are not: each tensor
passes in pieces through two page-locked buffers. Copies are work of the layers' own stream.

    host    fill A | fill B | wait A, fill A | wait B, fill B |
    device         | copy A | copy B         | copy A         | copy B
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch

from engine_core.devices import traits_of

STAGING_BYTES = 64 * 1024**2
"""Bytes of one of two buffers: long enough that starting a copy costs nothing beside it."""


class WeightTransfer:
    """Fills tensors of a model; this one where the host's memory is the model's."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `engine_core.layers.parameters.CopyWeight`."""
        destination.copy_(source)

    def finish(self) -> None:
        """Wait until everything is copied, and give back what the transfer holds."""


class StagingBuffer(Protocol):
    """Host memory that a device copies from on its own."""

    @property
    def memory(self) -> torch.Tensor:
        """uint8 [size], the host's to fill once `wait` has returned."""

    def send(self, destination: torch.Tensor, staged: torch.Tensor) -> None:
        """Begin to copy `staged`, a view of `memory`, in the order of the current stream."""

    def wait(self) -> None:
        """Return when the copy that was begun last, if any, has been done."""


class StagedTransfer(WeightTransfer):
    """`buffers`: used in turn; of equal size, at least 8 bytes."""

    def __init__(self, buffers: Sequence[StagingBuffer]) -> None:
        self._buffers = tuple(buffers)
        self._turns = itertools.cycle(self._buffers)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.device == destination.device or not destination.is_contiguous():
            super().copy(destination, source)
            return
        target_N = destination.view(-1)
        source_N = source.reshape(-1)
        start = 0
        while start < target_N.numel():
            buffer = next(self._turns)
            buffer.wait()
            room_N = buffer.memory.view(destination.dtype)
            stop = min(start + room_N.numel(), target_N.numel())
            staged_N = room_N[: stop - start]
            staged_N.copy_(source_N[start:stop])
            buffer.send(target_N[start:stop], staged_N)
            start = stop

    def finish(self) -> None:
        for buffer in self._buffers:
            buffer.wait()
        self._buffers = ()
        self._turns = itertools.cycle(())


class PinnedBuffer:
    """Page-locked memory, copied from by a GPU's current stream."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, destination: torch.Tensor, staged: torch.Tensor) -> None:
        destination.copy_(staged, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(destination.device))

    def wait(self) -> None:
        self._copied.synchronize()  # returns at once where nothing was recorded


def weight_transfer_to(device: torch.device) -> WeightTransfer:
    if traits_of(device).is_host:
        return WeightTransfer()
    return StagedTransfer([PinnedBuffer(STAGING_BYTES) for _ in range(2)])
