"""How many KV blocks the memory holds. Sizes in bytes unless a name says otherwise.

Owns the arithmetic and what the host tells of its memory. Must not know tensors: what a GPU tells
comes through `MemoryReader` (`engine_core.startup.device_memory`).
"""

import dataclasses
import os
from pathlib import Path
from typing import Protocol

from engine_core.errors import CacheTooSmall, ConfigurationError

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_LEAST_MARGIN_BYTES = 256 * 1024**2


def available_memory_bytes() -> int:
    """Memory that this process may still take: the system's or the control group's, whichever
    is less."""
    return min(_system_available_bytes(), _cgroup_available_bytes())


def _system_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available_bytes() -> int:
    for limit_file, usage_file in (
        (_CGROUP_V2 / "memory.max", _CGROUP_V2 / "memory.current"),
        (_CGROUP_V1 / "memory.limit_in_bytes", _CGROUP_V1 / "memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(limit_file.read_text()) - int(usage_file.read_text()))
        except (OSError, ValueError):  # no such group, or the limit is "max"
            continue
    return 2**62


class MemoryReader(Protocol):
    """The memory that the KV cache is taken from, after the weights."""

    def share_bytes(self, fraction: float, step_bytes: int) -> int:
        """What `fraction` of it leaves for the cache; may be negative."""
        ...

    def limit_bytes(self, step_bytes: int) -> int:
        """The most that a cache may have which is asked for by number or size."""
        ...

    def kept_free(self, step_bytes: int) -> str:
        """What `limit_bytes` leaves out, to follow "... are free" in a message; may be empty."""
        ...


class HostMemory:
    """On a CPU `fraction` is of what is free, so that a machine in use stays usable; steps find
    their memory in the rest."""

    def share_bytes(self, fraction: float, step_bytes: int) -> int:
        return int(available_memory_bytes() * fraction) - step_bytes

    def limit_bytes(self, step_bytes: int) -> int:
        return available_memory_bytes()

    def kept_free(self, step_bytes: int) -> str:
        return ""


class DeviceMemory:
    """On a GPU `fraction` is of all its memory and bounds everything together. The largest step was
    run and measured, so that what the cache leaves is enough for any: serving never runs out.

        | taken: weights, context, other processes | cache | step | margin | 1 - fraction |
        0                                                         fraction * total        total

    Args:
        total_bytes: of the device.
        free_bytes: of those, what nobody has taken after the weights.
    """

    def __init__(self, *, total_bytes: int, free_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._free_bytes = free_bytes

    @property
    def margin_bytes(self) -> int:
        """Kept free beside the measured step: pages of an allocator are coarse (2 MiB a tensor),
        and a step that is not the largest may leave larger holes."""
        return max(_LEAST_MARGIN_BYTES, self._total_bytes // 100)

    def share_bytes(self, fraction: float, step_bytes: int) -> int:
        taken_bytes = self._total_bytes - self._free_bytes
        return int(self._total_bytes * fraction) - taken_bytes - step_bytes - self.margin_bytes

    def limit_bytes(self, step_bytes: int) -> int:
        return max(0, self._free_bytes - step_bytes - self.margin_bytes)

    def kept_free(self, step_bytes: int) -> str:
        return (
            f" beside {_megabytes(step_bytes)} for the largest step and "
            f"{_megabytes(self.margin_bytes)} of margin"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CacheDemand:
    """What decides the number of blocks."""

    block_bytes: int
    """Memory of one block over all cache tensors."""
    blocks_per_request: int
    """Blocks that one request of max_model_len takes, over all groups."""
    max_num_seqs: int
    step_bytes: int
    """Memory of the largest step's activations, kept free."""


def choose_num_blocks(
    demand: CacheDemand,
    *,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    memory_fraction: float,
    memory: MemoryReader | None = None,
) -> int:
    """The number of blocks that the operator asked for, or that fit what is free.

    Without a wish: what `memory_fraction` leaves beside one step's activations, and never more than
    `max_num_seqs` requests of full length could use.

    Args:
        memory: default: the host's.

    Raises:
        ConfigurationError: two wishes at once, or one that exceeds the free memory.
        CacheTooSmall: not even one block fits.
    """
    memory = memory or HostMemory()
    free_bytes = memory.limit_bytes(demand.step_bytes)
    if num_blocks is not None and kv_cache_memory is not None:
        raise ConfigurationError("--num-blocks and --kv-cache-memory contradict; give one of them")
    if num_blocks is None and kv_cache_memory is None:
        usable = max(0, memory.share_bytes(memory_fraction, demand.step_bytes))
        # One block more than the requests can use would never be touched; the spare half keeps
        # finished prompts findable.
        useful = demand.max_num_seqs * demand.blocks_per_request * 3 // 2
        chosen = min(usable // demand.block_bytes, useful)
    elif num_blocks is not None:
        chosen = num_blocks
    else:
        chosen = (kv_cache_memory or 0) // demand.block_bytes
    # The pool has one block beside the usable ones: the null block.
    free = f"{_megabytes(free_bytes)} are free{memory.kept_free(demand.step_bytes)}"
    needed_bytes = (chosen + 1) * demand.block_bytes
    if chosen < 1:
        raise CacheTooSmall(
            f"the KV cache holds no block: a block takes {_megabytes(demand.block_bytes)}, "
            f"{free}; give more with --kv-cache-memory or --memory-fraction, or free some memory"
        )
    if needed_bytes > free_bytes:
        raise ConfigurationError(
            f"{chosen} KV blocks need {_megabytes(needed_bytes)}, {free}; lower --num-blocks or "
            "--kv-cache-memory"
        )
    return chosen


def choose_num_host_blocks(
    host_cache_memory: int, *, block_bytes: int, num_blocks: int, cache_is_on_host: bool = True
) -> int:
    """Blocks of host memory for what is evicted and swapped. 0 bytes are 0 blocks.

    Args:
        num_blocks: of the KV cache, chosen but not taken yet.
        cache_is_on_host: whether those come out of the same memory.

    Raises:
        CacheTooSmall: some memory was given, and not one block fits.
        ConfigurationError: more than is free.
    """
    if host_cache_memory == 0:
        return 0
    chosen = host_cache_memory // block_bytes
    if chosen < 1:
        raise CacheTooSmall(
            f"--host-cache-memory is {host_cache_memory} bytes and holds no block: a block takes "
            f"{_megabytes(block_bytes)}; give more, or 0 for none"
        )
    promised_bytes = (num_blocks + 1) * block_bytes if cache_is_on_host else 0
    free_bytes = max(0, available_memory_bytes() - promised_bytes)
    if chosen * block_bytes > free_bytes:
        raise ConfigurationError(
            f"--host-cache-memory is {_megabytes(host_cache_memory)}, {_megabytes(free_bytes)} "
            "are free beside the KV cache; lower it or the KV cache's share"
        )
    return chosen


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.1f} MiB"
