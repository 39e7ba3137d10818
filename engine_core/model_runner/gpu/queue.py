"""The order in which a device works: launches, waits, pinned memory, recorded graphs.

Owns the `DeviceQueue` protocol and the synchronous implementation for CPU tensors; the one for a
GPU is `cuda_queue`. All that depends on streams, events or graphs is behind it. Must not know
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Launched(Protocol):
    """Work that was given to the device."""

    def wait(self) -> None:
        """Return when it is done, with all that was launched before it.

        Raises:
            Exception: whatever the work raises late.
        """
        ...


class DeviceQueue(Protocol):
    """Carries out work in the order in which it was launched."""

    @property
    def device(self) -> torch.device: ...

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to by itself. Slow to make."""
        ...

    def launch(self, work: Work) -> Launched:
        """Start `work`, which must wait for nothing. Host memory that it reads or writes belongs to
        the device until `wait` has returned."""
        ...

    def capture(self, work: Work) -> Work:
        """Record `work`, without carrying it out; called inside launched work.

        Returns what replays it, with the same tensors at the same addresses. `work` must have been
        carried out once before (so that nothing is compiled while it is recorded).
        """
        ...

    def synchronize(self) -> None:
        """Wait for everything on the device, whoever launched it."""
        ...


class _Done:
    def wait(self) -> None:
        """Nothing is left to wait for."""


class SynchronousQueue:
    """Carries work out at once, on CPU tensors; a recorded graph is the work itself."""

    device = torch.device("cpu")

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `DeviceQueue.host_tensor`."""
        return torch.zeros(shape, dtype=dtype)

    def launch(self, work: Work) -> Launched:
        """See `DeviceQueue.launch`."""
        work()
        return _Done()

    def capture(self, work: Work) -> Work:
        """See `DeviceQueue.capture`."""
        return work

    def synchronize(self) -> None:
        """See `DeviceQueue.synchronize`."""
