"""Taking a running request's blocks: how it will come back, and the move itself.

The rules decide between computing again and copying to host memory; `Preemptor` carries it out.
Who the victim is, is the policy's to say.
"""

import enum
from typing import Protocol, assert_never

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus
from protocol.explanations import Preemption


class PreemptionMode(enum.StrEnum):
    RECOMPUTE = "recompute"
    """Blocks are freed; all tokens are computed again, less what the cache still has."""
    SWAP = "swap"
    """Blocks are copied to host memory and back."""


class PreemptionRule(Protocol):
    def mode(self, victim: Request) -> PreemptionMode:
        """How this running request is preempted."""
        ...

    def observe(self, num_tokens: int, num_copied_blocks: int, duration_s: float) -> None:
        """A step computed and copied that much in that time."""
        ...


class FixedRule:
    """Always the same."""

    def __init__(self, mode: PreemptionMode) -> None:
        self._mode = mode

    def mode(self, victim: Request) -> PreemptionMode:
        return self._mode

    def observe(self, num_tokens: int, num_copied_blocks: int, duration_s: float) -> None:
        """Nothing to learn."""


class RecomputeSingleSwapGroups(FixedRule):
    """One sequence is computed again; several, whose blocks are shared, are swapped."""

    def __init__(self) -> None:
        super().__init__(PreemptionMode.RECOMPUTE)

    def mode(self, victim: Request) -> PreemptionMode:
        if victim.get_max_num_running_seqs() > 1:
            return PreemptionMode.SWAP
        return PreemptionMode.RECOMPUTE


class MeasuredPreemption:
    """Compares the measured time of copying a request's blocks out and in with that of computing
    its tokens again: exponentially weighted means of seconds a token and seconds a block.

    Args:
        block_size: tokens a block.
    """

    _WEIGHT = 0.1

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._token_s: float | None = None
        self._block_s: float | None = None

    def mode(self, victim: Request) -> PreemptionMode:
        """Swap until a copy has been measured, so that one is."""
        if self._token_s is None or self._block_s is None:
            return PreemptionMode.SWAP
        num_tokens = sum(sequence.num_computed_tokens for sequence in victim.unfinished)
        num_blocks = -(-num_tokens // self._block_size)
        is_swap_cheaper = 2 * num_blocks * self._block_s < num_tokens * self._token_s
        return PreemptionMode.SWAP if is_swap_cheaper else PreemptionMode.RECOMPUTE

    def observe(self, num_tokens: int, num_copied_blocks: int, duration_s: float) -> None:
        if not num_tokens:
            return
        if not num_copied_blocks:
            self._token_s = self._mean(self._token_s, duration_s / num_tokens)
        elif self._token_s is not None:
            copying_s = max(0.0, duration_s - num_tokens * self._token_s)
            self._block_s = self._mean(self._block_s, copying_s / num_copied_blocks)

    def _mean(self, mean: float | None, value: float) -> float:
        return value if mean is None else mean + self._WEIGHT * (value - mean)


def make_preemption_rule(config: SchedulerConfig, block_size: int) -> PreemptionRule:
    """The rule that `config.preemption_mode` names."""
    match config.preemption_mode:
        case "default":
            return RecomputeSingleSwapGroups()
        case "recompute":
            return FixedRule(PreemptionMode.RECOMPUTE)
        case "swap":
            return FixedRule(PreemptionMode.SWAP)
        case "auto":
            return MeasuredPreemption(block_size)
        case unknown:
            assert_never(unknown)


class Preemptor:
    """Moves a running request, all its sequences, back to the waiting queue."""

    def __init__(self, live: RequestPool, kv_cache: KVCacheManager, rule: PreemptionRule) -> None:
        self._live = live
        self._kv_cache = kv_cache
        self._rule = rule

    def preempt(
        self,
        victim: Request,
        plan: PlanBuilder,
        reason: str,
        mode: PreemptionMode | None = None,
    ) -> None:
        """Every block that it holds is released; what the plan had for it is refunded. What an
        open step samples for it will be sampled again, and be the same: (seed, position) say it.

        Args:
            reason: in words, for whoever asks.
            mode: instead of what the rule says.
        """
        plan.drop(victim)
        sequences = [sequence for sequence in victim.unfinished if sequence.row is not None]
        num_tokens = sum(sequence.num_computed_tokens for sequence in sequences)
        num_blocks = self._kv_cache.num_blocks_free
        for sequence in sequences:
            sequence.drop_tokens_in_flight()
            row = self._live.unplace(sequence)
            self._live.rows.give_back(row)
        mode = mode or self._rule.mode(victim)
        if len(sequences) < len(victim.unfinished):
            mode = PreemptionMode.RECOMPUTE  # it was being computed again: there is little to keep
        if mode is PreemptionMode.SWAP and self._kv_cache.swap_out(sequences) is not None:
            status = RequestStatus.SWAPPED
            self._live.counters.num_preemptions_by_swap += 1
        else:
            # also where the host has no room: a request is never lost for that
            mode, status = PreemptionMode.RECOMPUTE, RequestStatus.PREEMPTED
            for sequence in sequences:
                self._kv_cache.free(sequence)
                sequence.num_computed_tokens = 0
        num_blocks = self._kv_cache.num_blocks_free - num_blocks
        self._live.back_to_queue(victim, status)
        self._live.counters.num_preemptions += 1
        victim.num_preemptions += 1
        victim.preemptions.append(
            Preemption(
                step_id=plan.step_id,
                mode=mode.value,
                reason=reason,
                num_tokens=num_tokens,
                num_blocks=num_blocks,
            )
        )

    def compute_again(self, swapped: list[Request]) -> None:
        """These waiting requests have nothing in host memory any more that can be trusted."""
        for request in reversed(swapped):
            self._live.waiting.remove_request(request)
            self._live.num_swapped -= 1
            for sequence in request.unfinished:
                self._kv_cache.invalidate(sequence)
                self._kv_cache.free(sequence)
                sequence.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
            self._live.waiting.prepend_request(request)
