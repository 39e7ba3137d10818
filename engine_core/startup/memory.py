"""How many KV blocks the memory holds, of each pool, and the longest request that they hold. Sizes
in bytes unless a name says otherwise."""

import bisect
import dataclasses
import gc
import logging
import math
from collections.abc import Callable, Sequence

import torch

from engine_core.errors import CacheTooSmall, ConfigurationError
from engine_core.kv_cache import KVCacheGroupSpec, PoolSizes, pool_sizes, sizes_of
from protocol.memory import available_memory_bytes

logger = logging.getLogger(__name__)

_LEAST_MARGIN_BYTES = 256 * 1024**2
_TYPICAL_TOKENS = 2048
"""Tokens of the request by which pools share memory: many short ones need more states, a long one
needs more keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory that the KV cache is taken from, after the weights. On a CPU `fraction` is of what
    is free, so that a machine in use stays usable; steps find their memory in the rest.
    `mapped_bytes`: of weights in a file's pages, which the system counts as free."""

    mapped_bytes: int = 0

    def share_bytes(self, fraction: float, step_bytes: int) -> int:
        """Bytes that `fraction` of the memory leaves for the cache; may be negative."""
        return int(self.limit_bytes(step_bytes) * fraction) - step_bytes

    def limit_bytes(self, step_bytes: int) -> int:
        """The most that a cache may have which is asked for by number or size."""
        return max(0, available_memory_bytes() - self.mapped_bytes)

    def kept_free(self, step_bytes: int) -> str:
        """What `limit_bytes` leaves out, to follow "... are free" in a message; may be empty."""
        return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """As `HostMemory`. On a GPU `fraction` is of all its memory and bounds everything together. The
    largest step was run and measured, so that what the cache leaves is enough for any: serving
    never runs out.

        | taken: weights, context, other processes | cache | step | margin | 1 - fraction |
        0                                                         fraction * total        total

    Args:
        total_bytes: of the device.
        free_bytes: of those, what is free after the weights.
    """

    total_bytes: int
    free_bytes: int

    @property
    def margin_bytes(self) -> int:
        """Kept free beside the measured step: pages of an allocator are coarse (2 MiB a tensor),
        and a step that is not the largest may leave larger holes."""
        return max(_LEAST_MARGIN_BYTES, self.total_bytes // 100)

    def share_bytes(self, fraction: float, step_bytes: int) -> int:
        taken_bytes = self.total_bytes - self.free_bytes
        return int(self.total_bytes * fraction) - taken_bytes - step_bytes - self.margin_bytes

    def limit_bytes(self, step_bytes: int) -> int:
        return max(0, self.free_bytes - step_bytes - self.margin_bytes)

    def kept_free(self, step_bytes: int) -> str:
        return (
            f" beside {_megabytes(step_bytes)} for the largest step and "
            f"{_megabytes(self.margin_bytes)} of margin"
        )


def choose_num_blocks(
    memory: HostMemory | DeviceMemory,
    pools: "PoolShares",
    *,
    step_bytes: int,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    memory_fraction: float,
) -> PoolSizes:
    """The number of blocks that the operator asked for, or that fit what is free.

    If not asked for: what `memory_fraction` leaves beside one step's activations, and never more
    than `max_num_seqs` requests of full length could use.

    Args:
        step_bytes: memory of the largest step's activations, kept free.
        num_blocks: asked for, of the first pool.

    Raises:
        ConfigurationError: both are given, or one exceeds the free memory.
        CacheTooSmall: not even one block fits.
    """
    free_bytes = memory.limit_bytes(step_bytes)
    if num_blocks is not None and kv_cache_memory is not None:
        raise ConfigurationError("--num-blocks and --kv-cache-memory contradict; give one of them")
    if num_blocks is None and kv_cache_memory is None:
        usable = max(0, memory.share_bytes(memory_fraction, step_bytes))
        chosen = pools.within(usable, pools.useful[0])
    elif num_blocks is not None:
        chosen = pools.beside(num_blocks)
    else:
        chosen = pools.within(kv_cache_memory or 0)
    free = f"{_megabytes(free_bytes)} are free{memory.kept_free(step_bytes)}"
    if chosen[0] < 1:
        raise CacheTooSmall(
            f"the KV cache holds no block: {pools.least}, "
            f"{free}; give more with --kv-cache-memory or --memory-fraction, or free some memory"
        )
    # Each pool has one block beside the usable ones: the null block.
    needed_bytes = pools.num_bytes([size + 1 for size in chosen])
    if needed_bytes > free_bytes:
        raise ConfigurationError(
            f"{' + '.join(map(str, chosen))} KV blocks need {_megabytes(needed_bytes)}, {free}; "
            "lower --num-blocks or --kv-cache-memory"
        )
    return pool_sizes(chosen)


def choose_num_host_blocks(
    host_cache_memory: int,
    pools: "PoolShares",
    *,
    num_blocks: PoolSizes,
    cache_is_on_host: bool = True,
) -> PoolSizes:
    """Blocks of host memory for what is evicted and swapped, shared as those of the KV cache are.
    0 bytes are 0 blocks.

    Args:
        num_blocks: of the KV cache, chosen but not taken yet.
        cache_is_on_host: whether those come out of the same memory.

    Raises:
        CacheTooSmall: some memory was given, and not one block fits.
        ConfigurationError: more than is free.
    """
    if host_cache_memory == 0:
        return 0
    chosen = pools.within(host_cache_memory)
    if chosen[0] < 1:
        raise CacheTooSmall(
            f"--host-cache-memory is {host_cache_memory} bytes and holds no block: {pools.least}; "
            "give more, or 0 for none"
        )
    reserved = [size + 1 for size in sizes_of(num_blocks)]
    reserved_bytes = pools.num_bytes(reserved) if cache_is_on_host else 0
    free_bytes = max(0, available_memory_bytes() - reserved_bytes)
    if pools.num_bytes(chosen) > free_bytes:
        raise ConfigurationError(
            f"--host-cache-memory is {_megabytes(host_cache_memory)}, {_megabytes(free_bytes)} "
            "are free beside the KV cache; lower it or the KV cache's share"
        )
    return pool_sizes(chosen)


# ------------------------------------------------------------------ the longest request


_FEW_SEQUENCES = 4
"""Sequences whose states a small cache holds, too, as far as that leaves it keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Blocks that one request takes of each pool, over all groups."""

    groups: Sequence[KVCacheGroupSpec]
    max_chunk_size: int
    block_size: int
    num_lookahead_slots: int = 0
    num_encoder_blocks: int = 0
    """Blocks of a request for what an encoder makes of its input; of the first pool."""

    def num_blocks(self, num_tokens: int) -> list[int]:
        """The most at once while this many tokens are computed."""
        num_slots = self.num_lookahead_slots
        counts = [self.num_encoder_blocks, *[0] * max(group.pool for group in self.groups)]
        for group in self.groups:
            counts[group.pool] += group.num_peak_blocks(
                num_tokens, self.max_chunk_size, self.block_size, num_slots
            )
        return counts

    def small_pool(self, num_tokens: int, sizes: Sequence[float]) -> int | None:
        """The first pool that is too small for so many tokens."""
        needs = enumerate(zip(self.num_blocks(num_tokens), sizes, strict=True))
        return next((pool for pool, (need, size) in needs if need > size), None)

    def max_num_tokens(self, sizes: Sequence[float], limit: int) -> int:
        """The most tokens, up to `limit`, that fit in so many blocks of each pool."""

        def is_too_long(num_tokens: int) -> bool:
            return self.small_pool(num_tokens, sizes) is not None

        return bisect.bisect_left(range(1, limit + 1), True, key=is_too_long)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolShares:
    """How pools share memory: each holds the longest request that the first one holds, which has
    the blocks of all tokens if any group keeps them; beyond that they go by what a request of
    `_TYPICAL_TOKENS` takes of each. One of states has checkpoints beside those of running requests,
    of as many bytes as the first pool has, and always enough for a few sequences.

    Args:
        pool_bytes: of a block of each.
        watermark: share of each that is kept free when a request is admitted.
    """

    pool_bytes: Sequence[int]
    request: RequestBlocks
    max_model_len: int
    max_num_seqs: int
    watermark: float

    @property
    def useful(self) -> list[int]:
        """Blocks of each that requests can use. One more would never be touched; the spare half
        keeps finished prompts cached."""
        each = self.request.num_blocks(self.max_model_len)
        return [self.max_num_seqs * number * 3 // 2 for number in each]

    @property
    def least(self) -> str:
        """Says what the fewest blocks take, for a message."""
        least_bytes = _megabytes(self.num_bytes(self.beside(1)))
        if len(self.pool_bytes) == 1:
            return f"a block takes {least_bytes}"
        return f"a block in each of {len(self.pool_bytes)} pools takes {least_bytes}"

    def num_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of so many blocks of each pool."""
        return sum(number * size for number, size in zip(sizes, self.pool_bytes, strict=True))

    def beside(self, num_first: int) -> list[int]:
        """Blocks of each pool, of which the first has so many."""
        num_others = len(self.pool_bytes) - 1
        if not num_others:
            return [num_first]
        usable = [num_first - int(self.watermark * num_first), *[math.inf] * num_others]
        longest = self.request.max_num_tokens(usable, self.max_model_len)
        least = self.request.num_blocks(max(1, longest))
        typical = self.request.num_blocks(min(self.max_model_len, _TYPICAL_TOKENS))
        decoding = dataclasses.replace(self.request, max_chunk_size=1)
        held = decoding.num_blocks(min(self.max_model_len, _TYPICAL_TOKENS))
        sizes = [num_first]
        for pool in range(1, len(self.pool_bytes)):
            is_sparse = pool in self._sparse_pools
            share = held[pool] if is_sparse else typical[pool]
            size = min(self.useful[pool], num_first * share // typical[0])
            if is_sparse:
                size += num_first * self.pool_bytes[0] // self.pool_bytes[pool]
                few = min(_FEW_SEQUENCES * typical[pool], num_first // _FEW_SEQUENCES)
                size = max(size, few)
            sizes.append(max(size, math.ceil(least[pool] / (1 - self.watermark))))
        return sizes

    @property
    def _sparse_pools(self) -> set[int]:
        groups = self.request.groups
        return {spec.pool for spec in groups} - {g.pool for g in groups if not g.is_sparse}

    def within(self, num_bytes: int, most: int | None = None) -> list[int]:
        """The most that fit into so many bytes, at most so many of the first pool."""
        limit = num_bytes // self.pool_bytes[0]
        numbers = range(1, (limit if most is None else min(limit, most)) + 1)
        return self.beside(
            bisect.bisect_right(
                numbers, num_bytes, key=lambda number: self.num_bytes(self.beside(number))
            )
        )


def checkpoint_interval(asked_for: int | None, pools: PoolShares) -> int:
    """Of how many tokens one state is kept; if not asked for, of as many as have as many bytes in
    other groups, so that checkpoints take no more than those."""
    if asked_for is not None:
        return asked_for
    state_bytes = other_bytes = 0
    for spec in pools.request.groups:
        if spec.is_sparse:
            state_bytes += pools.pool_bytes[spec.pool]
        else:
            other_bytes += pools.pool_bytes[spec.pool]
    if not (state_bytes and other_bytes):
        return _TYPICAL_TOKENS if state_bytes else 0
    return -(-state_bytes // other_bytes) * pools.request.block_size


def fit_max_model_len(
    request_blocks: RequestBlocks,
    *,
    num_blocks: PoolSizes,
    watermark: float,
    max_model_len: int,
    is_asked_for: bool,
) -> int:
    """The `max_model_len` in force: a request of that length must be admissible to an empty cache,
    which keeps the watermark free, or it could never run.

    The model's own limit gives way to the cache; one that the operator asked for does not.
    Raises CacheTooSmall: it does not, or the cache holds no request at all."""
    sizes = sizes_of(num_blocks)
    kept_free = [int(watermark * size) for size in sizes]
    usable = [size - kept for size, kept in zip(sizes, kept_free, strict=True)]
    capacity = request_blocks.max_num_tokens(usable, max_model_len)
    small_pool = request_blocks.small_pool(capacity + 1, usable)
    if capacity >= max_model_len or small_pool is None:
        return max_model_len
    blocks = f"{sizes[small_pool]} KV blocks"
    if len(sizes) > 1:
        blocks += f" of pool {small_pool}"
    if kept_free[small_pool]:
        blocks += f", {kept_free[small_pool]} of which --watermark keeps free,"
    if is_asked_for:
        raise CacheTooSmall(
            f"{blocks} hold a request of {capacity} tokens, --max-model-len is "
            f"{max_model_len}; lower it, or raise --num-blocks or --kv-cache-memory"
        )
    if capacity < 2:
        raise CacheTooSmall(
            f"{blocks} do not hold a prompt token and an answer for the model's "
            f"{len(request_blocks.groups)} cache groups; raise --num-blocks or --kv-cache-memory"
        )
    logger.warning(
        "max_model_len is %d, not the model's %d: that is what %s hold; raise "
        "--kv-cache-memory or --num-blocks for more",
        capacity,
        max_model_len,
        blocks,
    )
    return capacity


# ------------------------------------------------------------------ measuring a GPU


class CudaMeter:
    """One GPU's memory at this moment, as torch.cuda says it. `held` is what torch has from the
    driver, used or not: graphs, tensors and the holes between them; the rest of what is taken
    belongs to loaded kernels, libraries and other processes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def release(self) -> None:
        """Give back what nothing uses any more, and begin a new peak."""
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


def measure_extra_bytes(run: Callable[[], None], meter: CudaMeter, *, expected_bytes: int) -> int:
    """The most memory that `run` takes beyond what is taken before it.

    Torch's peak is taken of what it holds, not of what tensors use, so that holes count. What
    others take is read at the end: kernels that were loaded stay loaded.
    `expected_bytes`: taken by `run` for what is not to be counted."""
    meter.release()
    held_bytes = meter.held_bytes()
    other_bytes = _taken_by_others(meter)
    run()
    grown_bytes = max(0, _taken_by_others(meter) - other_bytes)
    return max(0, meter.peak_held_bytes() - held_bytes - expected_bytes) + grown_bytes


def read_device_memory(meter: CudaMeter) -> DeviceMemory:
    """What is free now. Called before `measure_extra_bytes`, whose result counts from here."""
    meter.release()
    return DeviceMemory(total_bytes=meter.total_bytes(), free_bytes=meter.free_bytes())


def _taken_by_others(meter: CudaMeter) -> int:
    return meter.total_bytes() - meter.free_bytes() - meter.held_bytes()


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.1f} MiB"
