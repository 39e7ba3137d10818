"""Page-locked host memory of exactly the size that was asked for, and tables in it."""

import mmap
import weakref

import torch

from kernels.interface.weights import QuantisedTensor, WeightPart

_ROWS_AT_ONCE = 4096


def pinned_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] that the device reads and writes by itself; ordinary memory if that is a
    CPU. torch's allocator of pinned memory would take up to twice as much, a power of two.
    Raises MemoryError: the driver cannot lock so much."""
    if device.type != "cuda" or num_bytes == 0:  # of nothing there is no page to lock
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if error:
        raise MemoryError(
            f"{num_bytes / 1024**3:.1f} GiB of host memory cannot be page-locked (CUDA error "
            f"{error}); lower --host-cache-memory, or raise the limit of locked memory (ulimit -l)"
        )

    def unlock(address: int, pages: mmap.mmap) -> None:
        torch.cuda.synchronize(device)  # copies may be under way
        runtime.cudaHostUnregister(address)

    # when no view is left of the storage; the pages stay until then
    weakref.finalize(memory.untyped_storage(), unlock, memory.data_ptr(), pages).atexit = False
    return memory


def row_table(part: WeightPart, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """See `Operations.row_table`: [V, N] in `dtype`, in page-locked memory of the host, as a tensor
    of the device, whose kernels read rows through the bus (unified addressing).
    Raises MemoryError: the driver cannot lock so much."""
    num_rows = part.shape[0]
    size = num_rows * part.shape[1] * dtype.itemsize
    memory = pinned_memory(size, device)
    table_VN = memory.view(dtype).view(part.shape)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        stop = min(num_rows, first + _ROWS_AT_ONCE)
        if isinstance(part, QuantisedTensor):
            rows = part.rows(torch.arange(first, stop)).dequantise()
        else:
            rows = part[first:stop]
        table_VN[first:stop].copy_(rows)
    if device.type != "cuda":
        return table_VN
    seen = torch.as_tensor(_SeenByDevice(memory), device=device)
    return seen.view(dtype).view(part.shape)


class _SeenByDevice:
    """Page-locked memory to `torch.as_tensor`, which keeps it alive: its address is the device's,
    too (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html)."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }
