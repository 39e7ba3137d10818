"""A scheduler's settings, by name, and the scheduler built from them. Resolved: no "auto" here."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.batching import BatchingPolicy, MixedBatching, PrefillFirstBatching
from engine_core.scheduler.policies import Fair, FirstComeFirstServed, Priority
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import (
    FixedRule,
    MeasuredPreemption,
    PreemptionMode,
    PreemptionRule,
    RecomputeSingleSwapGroups,
)
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.token_budget.base import FixedTokenBudget, TokenBudget
from engine_core.scheduler.token_budget.slo import SLOTokenBudget

PolicyName = Literal["fcfs", "priority", "fair"]
BatchingName = Literal["mixed", "prefill-first"]
PreemptionName = Literal["default", "recompute", "swap", "auto"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """
    Args:
        max_num_batched_tokens: most tokens of a step.
        max_num_seqs: most sequences running at once.
        max_model_len: most tokens of a sequence, prompt and output.
        max_chunk_size: most tokens of one sequence's prompt in a step; None for no such limit.
        policy: who is next and who gives way.
        batching: what a step is made of.
        prefill_delay_factor: of composition prefill-first.
        preemption: how a preempted request comes back; "default" computes one sequence again and
            swaps several, "auto" takes what is measured to be cheaper.
        force_preemption, priority_min_gain, priority_ageing_s: of policy priority.
        tenant_weights: of policy fair, by tenant; 1 where none is given.
        slo_tpot_ms: milliseconds per output token to keep; the step's budget follows from it.
        slo_ttft_ms: milliseconds to the first token to keep, together with `slo_tpot_ms`.
        max_num_partial_prefills: most prompts partly computed at once.
        max_long_partial_prefills: of those, most long ones.
        long_prefill_token_threshold: a prompt of more tokens is long.
        num_lookahead_slots: slots that each sequence gets behind its tokens.
        max_queued_requests: beyond them a new request is refused.
        max_queued_tokens: likewise, prompt and output tokens of the waiting requests.
        max_num_adapters: most adapters in use at once.
        log_events: keep each request's events.
        max_steps_in_flight: most steps planned and not updated; as many as the executor runs.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_chunk_size: int | None = None
    policy: PolicyName = "fcfs"
    batching: BatchingName = "mixed"
    prefill_delay_factor: float = 0.0
    preemption: PreemptionName = "default"
    force_preemption: bool = True
    priority_min_gain: int = 1
    priority_ageing_s: float | None = None
    tenant_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slo_tpot_ms: float | None = None
    slo_ttft_ms: float | None = None
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    long_prefill_token_threshold: int | None = None
    num_lookahead_slots: int = 0
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_num_adapters: int | None = None
    log_events: bool = False
    max_steps_in_flight: int = 1


def build_scheduler(config: SchedulerConfig, kv_cache: KVCacheManager) -> Scheduler:
    """
    Raises:
        ValueError: a setting outside its limits, or a name that is none.
    """
    return Scheduler(
        kv_cache=kv_cache,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_chunk_size=config.max_chunk_size,
        policy=_policy(config),
        batching=_composition(config),
        preemption=_preemption(config, kv_cache.block_size),
        step_budget=_step_budget(config),
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        num_lookahead_slots=config.num_lookahead_slots,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_num_adapters=config.max_num_adapters,
        log_events=config.log_events,
        max_steps_in_flight=config.max_steps_in_flight,
    )


def _policy(config: SchedulerConfig) -> SchedulingPolicy:
    match config.policy:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return Priority(
                min_gain=config.priority_min_gain,
                force_preemption=config.force_preemption,
                ageing_s=config.priority_ageing_s,
            )
        case "fair":
            return Fair(config.tenant_weights)
    raise ValueError(f"policy is {config.policy!r}, it must be fcfs, priority or fair")


def _composition(config: SchedulerConfig) -> BatchingPolicy:
    match config.batching:
        case "mixed":
            return MixedBatching()
        case "prefill-first":
            return PrefillFirstBatching(config.prefill_delay_factor)
    raise ValueError(f"composition is {config.batching!r}, it must be mixed or prefill-first")


def _preemption(config: SchedulerConfig, block_size: int) -> PreemptionRule:
    match config.preemption:
        case "default":
            return RecomputeSingleSwapGroups()
        case "recompute":
            return FixedRule(PreemptionMode.RECOMPUTE)
        case "swap":
            return FixedRule(PreemptionMode.SWAP)
        case "auto":
            return MeasuredPreemption(block_size)
    raise ValueError(
        f"preemption is {config.preemption!r}, it must be default, recompute, swap or auto"
    )


def _step_budget(config: SchedulerConfig) -> TokenBudget:
    if config.slo_tpot_ms is None and config.slo_ttft_ms is None:
        return FixedTokenBudget(config.max_num_batched_tokens)
    return SLOTokenBudget(
        config.max_num_batched_tokens,
        target_tpot_s=_seconds(config.slo_tpot_ms),
        target_ttft_s=_seconds(config.slo_ttft_ms),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
