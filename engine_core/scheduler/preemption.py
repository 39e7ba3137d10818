"""Taking a running request's blocks: how it will come back, and the move itself. Which request is
the victim, the policy decides."""

import enum
from typing import assert_never

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool
from protocol.explanations import Preemption, PreemptionCause


class PreemptionMode(enum.StrEnum):
    RECOMPUTE = "recompute"
    """Blocks are freed; all tokens are computed again, less those in the prefix cache."""
    SWAP = "swap"
    """Blocks are copied to host memory and back."""


class PreemptionRule:
    """Chooses each victim's mode: always the same."""

    def __init__(self, mode: PreemptionMode = PreemptionMode.RECOMPUTE) -> None:
        self._mode = mode

    def mode(self, victim: Request) -> PreemptionMode:
        """How this running request is preempted."""
        return self._mode

    def observe(self, num_tokens: int, num_copied_blocks: int, duration_s: float) -> None:
        """A step computed and copied that much in that time."""


class RecomputeSingleSwapGroups(PreemptionRule):
    """One sequence is recomputed; several, whose blocks are shared, are swapped."""

    def mode(self, victim: Request) -> PreemptionMode:
        return PreemptionMode.SWAP if victim.num_running_sequences > 1 else self._mode


class MeasuredPreemption(PreemptionRule):
    """Compares the measured time of copying a request's blocks out and in with that of computing
    its tokens again: exponentially weighted means of seconds a token and seconds a block."""

    _WEIGHT = 0.1

    def __init__(self, block_size: int) -> None:
        super().__init__(PreemptionMode.SWAP)
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
    match config.preemption_mode:
        case "default":
            return RecomputeSingleSwapGroups()
        case "recompute" | "swap":
            return PreemptionRule(PreemptionMode(config.preemption_mode))
        case "auto":
            return MeasuredPreemption(block_size)
        case unknown:
            assert_never(unknown)


class Preemptor:
    """Moves a running request, all its sequences, back to the waiting queue."""

    def __init__(self, pool: RequestPool, rule: PreemptionRule) -> None:
        self._pool = pool
        self._kv_cache = pool.kv_cache
        self._rule = rule

    def preempt(
        self,
        victim: Request,
        plan: PlanBuilder,
        cause: PreemptionCause,
        reason: str,
        mode: PreemptionMode | None = None,
    ) -> None:
        """Free its blocks and refund its tokens in the plan. What a step in flight samples for it
        is dropped, and will be sampled again, equal: (seed, position) determine it.

        Args:
            cause, reason: for statistics; and in words, for explanations.
            mode: instead of the rule's.
        """
        plan.drop(victim)
        sequences = self._leave_rows(victim)
        num_tokens = sum(sequence.num_computed_tokens for sequence in sequences)
        num_free_before = self._kv_cache.num_blocks_free
        mode = mode or self._rule.mode(victim)
        if len(sequences) < len(victim.unfinished):
            mode = PreemptionMode.RECOMPUTE  # it was being recomputed: there is little to keep
        if victim.report is not None and victim.report.pools_all_states:
            mode = PreemptionMode.RECOMPUTE  # what was pooled goes with its row
        if mode is PreemptionMode.SWAP and self._kv_cache.swap_out(sequences) is not None:
            self._pool.requeue(victim, RequestStatus.SWAPPED)
            self._pool.counters.num_preemptions_by_swap += 1
        else:
            # also where the host has no room: no request is lost for that
            mode = PreemptionMode.RECOMPUTE
            self._requeue_without_blocks(victim, sequences)
        self._pool.counters.num_preemptions_by_cause[cause.value] += 1
        self._record(victim, plan.step_id, mode, reason, num_tokens, num_free_before)

    def recompute_all(self, plan: PlanBuilder, cause: PreemptionCause, reason: str) -> None:
        """Preempt all that run; they keep their order."""
        for request in reversed(list(self._pool.running.values())):
            self.preempt(request, plan, cause, reason, PreemptionMode.RECOMPUTE)

    def recompute_running(self, step_id: int, reason: str) -> None:
        """A step failed: all running requests wait again, in their order, ahead of the others. The
        runner hears of it with the next plan."""
        for request in reversed(list(self._pool.running.values())):
            num_free_before = self._kv_cache.num_blocks_free
            sequences = self._leave_rows(request)
            num_tokens = sum(sequence.num_computed_tokens for sequence in sequences)
            self._pool.preempted_req_ids += [
                sequence.sequence_id for sequence in sequences if sequence.is_known_to_runner
            ]
            self._requeue_without_blocks(request, sequences)
            mode = PreemptionMode.RECOMPUTE
            self._pool.counters.num_preemptions_by_cause[PreemptionCause.FAULT.value] += 1
            self._record(request, step_id, mode, reason, num_tokens, num_free_before)

    def _leave_rows(self, request: Request) -> list[Sequence]:
        """Free the request's rows. Returns the sequences that had one."""
        sequences = [sequence for sequence in request.unfinished if sequence.row is not None]
        for sequence in sequences:
            sequence.drop_placeholders()
            self._pool.free_row(sequence)
        return sequences

    def _requeue_without_blocks(self, request: Request, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._kv_cache.free(sequence)
            sequence.num_computed_tokens = 0
        self._pool.requeue(request, RequestStatus.PREEMPTED)

    def _record(
        self,
        request: Request,
        step_id: int,
        mode: PreemptionMode,
        reason: str,
        num_tokens: int,
        num_free_before: int,
    ) -> None:
        self._pool.counters.num_preemptions += 1
        request.account.add_preemption(
            Preemption(
                step_id=step_id,
                mode=mode.value,
                reason=reason,
                num_tokens=num_tokens,
                num_blocks=self._kv_cache.num_blocks_free - num_free_before,
            )
        )

    def recompute_swapped(self) -> None:
        """Host blocks may be wrong behind a fault: swapped requests are computed again."""
        swapped = [
            request for request in self._pool.waiting if request.status is RequestStatus.SWAPPED
        ]
        for request in reversed(swapped):
            self._pool.waiting.remove_request(request)
            self._pool.num_swapped -= 1
            for sequence in request.unfinished:
                self._kv_cache.invalidate(sequence)
                self._kv_cache.free(sequence)
                sequence.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
            self._pool.waiting.prepend_request(request)
