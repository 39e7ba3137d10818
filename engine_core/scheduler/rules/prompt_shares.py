"""How a step's tokens are shared by a long prompt and the shorter ones behind it."""

import numpy as np

from engine_core.scheduler.batch_state import Int32Array
from engine_core.scheduler.request_pool import RequestPool


class PromptShares:
    """A prompt that a step cannot finish leaves up to half of what the step has for it to sequences
    after it that have less to compute, running or next in the queue.

        budget 128    |long: 64               |short: 64              |
        two long ones |long: 64               |long: 32  |short: 32   |

    So a short prompt behind k long ones starts in the next step and has `budget >> k` tokens of
    each step at least, less one for each decode; and a long one keeps half of its pace."""

    def __init__(self, pool: RequestPool, max_num_seqs: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs

    def limit(self, num_uncomputed: Int32Array, max_chunk: int, budget: int) -> Int32Array:
        """Most tokens of each running sequence in this step, given what each has left, in order."""
        if int(num_uncomputed[num_uncomputed.argmax()]) <= 1:
            return num_uncomputed
        counts: Int32Array = np.minimum(num_uncomputed, max_chunk)
        start = 0
        while start < len(counts):
            ends = np.cumsum(counts[start:])
            index = int(np.searchsorted(ends, budget, side="left"))
            if index == len(ends):
                break
            budget -= int(ends[index - 1]) if index else 0
            at = start + index
            if num_uncomputed[at] <= budget or budget < 2:
                break
            counts[at] = budget - min(budget // 2, self._num_shorter_behind(num_uncomputed, at))
            if counts[at] == budget:
                break
            budget -= int(counts[at])
            start = at + 1
        return counts

    def _num_shorter_behind(self, num_uncomputed: Int32Array, at: int) -> int:
        """Tokens that sequences behind this one have to compute, of those with less than it."""
        own, behind = num_uncomputed[at], num_uncomputed[at + 1 :]
        num_tokens = int(behind[behind < own].sum())
        pool = self._pool
        if pool.waiting:
            head = pool.waiting.peek_request()
            num_rows = self._max_num_seqs - pool.num_reserved_rows
            if head.num_running_sequences <= num_rows and head.num_tokens < int(own):
                all_fit = len(pool.waiting) <= num_rows
                num_tokens += pool.num_queued_tokens if all_fit else head.num_tokens
        return num_tokens
