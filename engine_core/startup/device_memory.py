"""What a GPU tells of its memory, and how much of it the largest step takes.

Owns the measurement. Must not know plans, models or what the numbers are used for. Sizes in bytes.
"""

import gc
import logging
from collections.abc import Callable
from typing import Protocol

import torch

from engine_core.startup.cache_size import DeviceMemory

logger = logging.getLogger(__name__)


class MemoryMeter(Protocol):
    """One GPU's memory at this moment. `held` is what torch has from the driver, used or not:
    graphs, tensors and the holes between them; the rest of what is taken belongs to loaded kernels,
    libraries and other processes."""

    def release(self) -> None:
        """Give back what nothing uses any more, and begin a new peak."""
        ...

    def total_bytes(self) -> int: ...
    def free_bytes(self) -> int: ...
    def held_bytes(self) -> int: ...
    def peak_held_bytes(self) -> int: ...


class CudaMeter:
    """torch.cuda of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_held_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


def measure_extra_bytes(run: Callable[[], None], meter: MemoryMeter, *, expected_bytes: int) -> int:
    """The most memory that `run` takes beyond what is taken before it.

    Torch's peak is taken of what it holds, not of what tensors use, so that holes count. What
    others take is read at the end: kernels that were loaded stay loaded.

    Args:
        expected_bytes: taken by `run` for what is not to be counted.
    """
    meter.release()
    held_bytes = meter.held_bytes()
    other_bytes = _taken_by_others(meter)
    run()
    grown_bytes = max(0, _taken_by_others(meter) - other_bytes)
    return max(0, meter.peak_held_bytes() - held_bytes - expected_bytes) + grown_bytes


def read_device_memory(meter: MemoryMeter) -> DeviceMemory:
    """What is free now. Called before `measure_extra_bytes`, whose result counts from here."""
    meter.release()
    return DeviceMemory(total_bytes=meter.total_bytes(), free_bytes=meter.free_bytes())


def _taken_by_others(meter: MemoryMeter) -> int:
    return meter.total_bytes() - meter.free_bytes() - meter.held_bytes()
