"""How many KV blocks the memory holds. Sizes in bytes unless a name says otherwise."""

import dataclasses
import os
from pathlib import Path

from engine_core.errors import CacheTooSmall, ConfigurationError

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


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
) -> int:
    """The number of blocks that the operator asked for, or that fit what is free.

    Without a wish: `memory_fraction` of the free memory less one step's activations, and never
    more than `max_num_seqs` requests of full length could use.

    Raises:
        ConfigurationError: two wishes at once, or one that exceeds the free memory.
        CacheTooSmall: not even one block fits.
    """
    free_bytes = available_memory_bytes()
    if num_blocks is not None and kv_cache_memory is not None:
        raise ConfigurationError("--num-blocks and --kv-cache-memory contradict; give one of them")
    if num_blocks is None and kv_cache_memory is None:
        usable = max(0, int(free_bytes * memory_fraction) - demand.step_bytes)
        # One block more than the requests can use would never be touched; the spare half keeps
        # finished prompts findable.
        useful = demand.max_num_seqs * demand.blocks_per_request * 3 // 2
        chosen = min(usable // demand.block_bytes, useful)
    elif num_blocks is not None:
        chosen = num_blocks
    else:
        chosen = (kv_cache_memory or 0) // demand.block_bytes
    # The pool has one block beside the usable ones: the null block.
    needed_bytes = (chosen + 1) * demand.block_bytes
    if chosen < 1:
        raise CacheTooSmall(
            f"the KV cache holds no block: a block takes {_megabytes(demand.block_bytes)}, "
            f"{_megabytes(free_bytes)} are free; give more with --kv-cache-memory or "
            "--memory-fraction, or free some memory"
        )
    if needed_bytes > free_bytes:
        raise ConfigurationError(
            f"{chosen} KV blocks need {_megabytes(needed_bytes)}, {_megabytes(free_bytes)} are "
            f"free; lower --num-blocks or --kv-cache-memory"
        )
    return chosen


def choose_num_host_blocks(host_cache_memory: int, *, block_bytes: int, num_blocks: int) -> int:
    """Blocks of host memory for what is evicted and swapped, beside `num_blocks` of the KV cache
    that are chosen but not taken yet. 0 bytes are 0 blocks.

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
    free_bytes = max(0, available_memory_bytes() - (num_blocks + 1) * block_bytes)
    if chosen * block_bytes > free_bytes:
        raise ConfigurationError(
            f"--host-cache-memory is {_megabytes(host_cache_memory)}, {_megabytes(free_bytes)} "
            "are free beside the KV cache; lower it or the KV cache's share"
        )
    return chosen


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.1f} MiB"
