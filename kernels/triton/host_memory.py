"""Page-locked host memory of exactly the size that was asked for."""

import mmap
import weakref

import torch


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
            f"{error}); lower --host-cache-memory"
        )

    def unlock(address: int, pages: mmap.mmap) -> None:
        torch.cuda.synchronize(device)  # copies may be under way
        runtime.cudaHostUnregister(address)

    # when no view is left of the storage; the pages stay until then
    weakref.finalize(memory.untyped_storage(), unlock, memory.data_ptr(), pages).atexit = False
    return memory
