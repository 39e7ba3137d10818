"""How many blocks requests will still take, and who can never have enough. Takes none itself."""

import numpy as np

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence import Sequence


class BlockNeeds:
    """Blocks not taken yet."""

    def __init__(
        self, live: RequestPool, kv_cache: KVCacheManager, config: SchedulerConfig
    ) -> None:
        self._live = live
        self._kv_cache = kv_cache
        self._config = config

    def of_running(self) -> int:
        """Blocks that running requests will still take for the tokens that they have."""
        rows = self._live.rows
        order = rows.order.astype(np.int64)  # numpy looks up by it several times as fast
        left = rows.num_tokens[order] - rows.num_computed[order]
        promised = 0
        is_prefill = left > 1
        if np.count_nonzero(is_prefill):
            for row in order[is_prefill].tolist():
                sequence = rows.sequences[row]
                assert sequence is not None
                promised += self.of_sequence(sequence)
        if self._live.num_reserved_rows > len(order):
            promised += sum(map(self.of_branches, self._live.running.values()))
        return promised

    def of_sequence(self, sequence: Sequence) -> int:
        return self._kv_cache.num_reserved_blocks(
            sequence, self._config.max_chunk, self._config.num_lookahead_slots
        )

    def of_branches(self, request: Request) -> int:
        """Blocks that the sequences without a row will take when they branch off: all but the
        prompt's full blocks, for what they have sampled and one token more."""
        if request.num_sequences == 1:
            return 0
        existing = request.unfinished
        branches = [seq.num_tokens for seq in existing if seq.row is None]
        if request.status is not RequestStatus.RUNNING:
            branches = branches[1:]  # the first is the trunk
        num_missing = request.get_max_num_running_seqs() - len(existing)
        branches += [request.num_prompt_tokens] * num_missing
        num_slots = self._config.num_lookahead_slots + 1
        num_shared = request.num_prompt_tokens // self._kv_cache.block_size
        num_shared *= len(self._kv_cache.groups) if self._shares_prompt(request) else 0
        return sum(
            max(
                1,
                self._kv_cache.num_peak_blocks(
                    num_tokens + num_slots, self._config.max_chunk + num_slots
                )
                - num_shared,
            )
            for num_tokens in branches
        )

    def _shares_prompt(self, request: Request) -> bool:
        """Whether branches fork from the trunk; with sliding windows only as long as nothing has
        been sampled."""
        has_windows = any(spec.sliding_window is not None for spec in self._kv_cache.groups)
        return not has_windows or len(request.sequences) == 1


def why_never(request: Request, kv_cache: KVCacheManager, config: SchedulerConfig) -> str | None:
    """Why the request cannot run even alone, or None if it can."""
    for limit, option in (
        (config.max_num_seqs, "--max-num-seqs"),
        (config.max_num_batched_tokens, "--max-num-batched-tokens"),
    ):
        if request.num_sequences > limit:
            return (
                f"num_sequences is {request.num_sequences}, the limit is {limit} ({option}); ask "
                "for fewer or raise it"
            )
    num_slots = config.num_lookahead_slots
    num_needed = kv_cache.num_peak_blocks(
        request.num_tokens + num_slots, config.max_chunk + num_slots
    )
    num_needed += (request.num_sequences - 1) * len(kv_cache.groups)
    num_usable = kv_cache.num_blocks
    if request.status is RequestStatus.WAITING:
        num_usable -= kv_cache.watermark_blocks
    if num_needed <= num_usable:
        return None
    what = "prompt and output have" if request.num_output_tokens else "prompt has"
    return (
        f"{what} {request.num_tokens} tokens and need {num_needed} KV blocks of "
        f"{kv_cache.block_size} tokens, the cache has {kv_cache.num_blocks} less "
        f"{kv_cache.num_blocks - num_usable} as head-room; shorten the prompt or raise --num-blocks"
    )
