"""The longest request that the KV cache holds, in blocks and tokens. Must not know bytes."""

import bisect
import dataclasses
import logging
from collections.abc import Sequence

from engine_core.errors import CacheTooSmall
from engine_core.kv_cache import KVCacheGroupSpec

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestNeed:
    """Blocks that one request takes, over all groups."""

    groups: Sequence[KVCacheGroupSpec]
    max_chunk_size: int
    block_size: int

    def num_blocks(self, num_tokens: int) -> int:
        """The most at once while so many tokens are computed."""
        return sum(
            group.num_peak_blocks(num_tokens, self.max_chunk_size, self.block_size)
            for group in self.groups
        )

    def num_tokens(self, num_blocks: int, limit: int) -> int:
        """The most tokens, up to `limit`, that fit in so many blocks."""
        lengths = range(1, limit + 1)
        return bisect.bisect_right(lengths, num_blocks, key=self.num_blocks)


def fit_max_model_len(
    need: RequestNeed,
    *,
    num_blocks: int,
    watermark: float,
    max_model_len: int,
    is_asked_for: bool,
) -> int:
    """The `max_model_len` in force: a request of that length must be admissible to an empty cache,
    which keeps the watermark free, or it could never run.

    The model's own limit gives way to the cache; one that the operator asked for does not.

    Raises:
        CacheTooSmall: it does not, or the cache holds no request at all.
    """
    num_kept_free = int(watermark * num_blocks)
    capacity = need.num_tokens(num_blocks - num_kept_free, max_model_len)
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
            f"{len(need.groups)} cache groups; raise --num-blocks or --kv-cache-memory"
        )
    logger.warning(
        "max_model_len is %d, not the model's %d: that is what %s hold; raise "
        "--kv-cache-memory or --num-blocks for more",
        capacity,
        max_model_len,
        blocks,
    )
    return capacity
