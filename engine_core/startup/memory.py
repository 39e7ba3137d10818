"""How many KV blocks the memory holds, and the longest request that they hold. Sizes in bytes
unless a name says otherwise."""

import bisect
import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence

import torch

from engine_core.errors import CacheTooSmall, ConfigurationError
from engine_core.kv_cache import KVCacheGroupSpec
from protocol.memory import available_memory_bytes

logger = logging.getLogger(__name__)

_LEAST_MARGIN_BYTES = 256 * 1024**2


class HostMemory:
    """The memory that the KV cache is taken from, after the weights. On a CPU `fraction` is of what
    is free, so that a machine in use stays usable; steps find their memory in the rest."""

    def share_bytes(self, fraction: float, step_bytes: int) -> int:
        """Bytes that `fraction` of the memory leaves for the cache; may be negative."""
        return int(available_memory_bytes() * fraction) - step_bytes

    def limit_bytes(self, step_bytes: int) -> int:
        """The most that a cache may have which is asked for by number or size."""
        return available_memory_bytes()

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
    *,
    block_bytes: int,
    blocks_per_request: int,
    max_num_seqs: int,
    step_bytes: int,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    memory_fraction: float,
) -> int:
    """The number of blocks that the operator asked for, or that fit what is free.

    If not asked for: what `memory_fraction` leaves beside one step's activations, and never more
    than `max_num_seqs` requests of full length could use.

    Args:
        block_bytes: memory of one block over all cache tensors.
        blocks_per_request: what one request of max_model_len takes, over all groups.
        step_bytes: memory of the largest step's activations, kept free.

    Raises:
        ConfigurationError: both are given, or one exceeds the free memory.
        CacheTooSmall: not even one block fits.
    """
    free_bytes = memory.limit_bytes(step_bytes)
    if num_blocks is not None and kv_cache_memory is not None:
        raise ConfigurationError("--num-blocks and --kv-cache-memory contradict; give one of them")
    if num_blocks is None and kv_cache_memory is None:
        usable = max(0, memory.share_bytes(memory_fraction, step_bytes))
        # One block more than the requests can use would never be touched; the spare half keeps
        # finished prompts cached.
        useful = max_num_seqs * blocks_per_request * 3 // 2
        chosen = min(usable // block_bytes, useful)
    elif num_blocks is not None:
        chosen = num_blocks
    else:
        chosen = (kv_cache_memory or 0) // block_bytes
    # The pool has one block beside the usable ones: the null block.
    free = f"{_megabytes(free_bytes)} are free{memory.kept_free(step_bytes)}"
    needed_bytes = (chosen + 1) * block_bytes
    if chosen < 1:
        raise CacheTooSmall(
            f"the KV cache holds no block: a block takes {_megabytes(block_bytes)}, "
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
    reserved_bytes = (num_blocks + 1) * block_bytes if cache_is_on_host else 0
    free_bytes = max(0, available_memory_bytes() - reserved_bytes)
    if chosen * block_bytes > free_bytes:
        raise ConfigurationError(
            f"--host-cache-memory is {_megabytes(host_cache_memory)}, {_megabytes(free_bytes)} "
            "are free beside the KV cache; lower it or the KV cache's share"
        )
    return chosen


# ------------------------------------------------------------------ the longest request


@dataclasses.dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Blocks that one request takes, over all groups."""

    groups: Sequence[KVCacheGroupSpec]
    max_chunk_size: int
    block_size: int
    num_lookahead_slots: int = 0
    num_encoder_blocks: int = 0
    """Blocks of a request for what an encoder makes of its input."""

    def num_blocks(self, num_tokens: int) -> int:
        """The most at once while this many tokens are computed."""
        num_slots = self.num_lookahead_slots
        return self.num_encoder_blocks + sum(
            group.num_peak_blocks(
                num_tokens + num_slots, self.max_chunk_size + num_slots, self.block_size
            )
            for group in self.groups
        )

    def max_num_tokens(self, num_blocks: int, limit: int) -> int:
        """The most tokens, up to `limit`, that fit in this many blocks."""
        lengths = range(1, limit + 1)
        return bisect.bisect_right(lengths, num_blocks, key=self.num_blocks)


def fit_max_model_len(
    request_blocks: RequestBlocks,
    *,
    num_blocks: int,
    watermark: float,
    max_model_len: int,
    is_asked_for: bool,
) -> int:
    """The `max_model_len` in force: a request of that length must be admissible to an empty cache,
    which keeps the watermark free, or it could never run.

    The model's own limit gives way to the cache; one that the operator asked for does not.
    Raises CacheTooSmall: it does not, or the cache holds no request at all."""
    num_kept_free = int(watermark * num_blocks)
    capacity = request_blocks.max_num_tokens(num_blocks - num_kept_free, max_model_len)
    if capacity >= max_model_len:
        return max_model_len
    blocks = f"{num_blocks} KV blocks"
    if num_kept_free:
        blocks += f", {num_kept_free} of which --watermark keeps free,"
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
