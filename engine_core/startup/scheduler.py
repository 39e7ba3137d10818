"""A scheduler from its settings: which parts it has, and in which order they are called."""

from engine_core.kv_cache import KVCacheManager, Transfers
from engine_core.scheduler.aborts import Aborts
from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.batching import MixedBatching, PrefillFirstBatching
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.constraints import Constraints
from engine_core.scheduler.forced_preemption import ForcedPreemption
from engine_core.scheduler.in_flight import InFlightSteps
from engine_core.scheduler.part import SchedulerPart, SchedulerParts
from engine_core.scheduler.policies import make_policy
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import PreemptionRule, Preemptor, make_preemption_rule
from engine_core.scheduler.process_outputs import StepOutputProcessor
from engine_core.scheduler.report.explanations import Explanations
from engine_core.scheduler.report.prompt_changes import PromptChanges
from engine_core.scheduler.report.statistics import PoolStatistics
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.rules.adapters import AdapterSlots
from engine_core.scheduler.rules.constrained_steps import ConstrainedSteps
from engine_core.scheduler.rules.deadlines import Deadlines
from engine_core.scheduler.rules.decode_steps import DecodeSteps
from engine_core.scheduler.rules.encoder_inputs import EncoderInputRule
from engine_core.scheduler.rules.fault_isolation import FaultIsolation
from engine_core.scheduler.rules.micro_batches import MicroBatches
from engine_core.scheduler.rules.partial_prefills import PartialPrefills
from engine_core.scheduler.rules.prompt_shares import PromptShares
from engine_core.scheduler.rules.queue_limits import QueueLimits
from engine_core.scheduler.rules.shared_states import SharedStates
from engine_core.scheduler.rules.transfers import TransferRule
from engine_core.scheduler.schedule_running import RunningScheduler
from engine_core.scheduler.schedule_waiting import WaitingScheduler
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.speculation.base import Proposer
from engine_core.scheduler.speculation.speculator import Speculator
from engine_core.scheduler.token_budget.attainment import SLOAttainment
from engine_core.scheduler.token_budget.base import TokenBudget
from engine_core.scheduler.token_budget.feedback import StepFeedback
from engine_core.scheduler.token_budget.slo import make_token_budget


def build_scheduler(
    config: SchedulerConfig,
    kv_cache: KVCacheManager,
    *,
    policy: SchedulingPolicy | None = None,
    preemption_rule: PreemptionRule | None = None,
    token_budget: TokenBudget | None = None,
    proposer: Proposer | None = None,
    draft_method: str = "draft",
    constraints: Constraints | None = None,
    transfers: Transfers | None = None,
) -> Scheduler:
    """
    Args:
        kv_cache: the blocks; this scheduler alone may change it.
        policy, preemption_rule, token_budget: instead of those that the config names.
        proposer: of drafts; None: the runner makes them, if there are any.
        draft_method: by which they are counted.
        constraints: what structured outputs are made with; None: there are none.
        transfers: of blocks from other engines; None: there are none.
    """
    rule = preemption_rule or make_preemption_rule(config, kv_cache.block_size)
    parts = SchedulerParts()
    pool = RequestPool(
        kv_cache,
        policy or make_policy(config),
        BatchState(config.max_num_seqs, config.max_model_len),
        max_model_len=config.max_model_len,
        on_finish=parts.on_finish,
    )
    preemptor = Preemptor(pool, rule)
    in_flight = InFlightSteps(
        pool, config.max_steps_in_flight, is_pipeline=config.pipeline_parallel_size > 1
    )
    aborts = Aborts(pool, in_flight)
    micro_batches = MicroBatches(pool, in_flight, config)
    explanations = Explanations(pool)
    adapters = AdapterSlots(pool, config.max_num_adapters, loads=config.loads_adapters)
    partial = PartialPrefills(pool, config)
    encoder = EncoderInputRule(pool, explanations, config)
    waiting = WaitingScheduler(pool, explanations, config, parts, encoder)
    speculator = Speculator(pool, config, proposer) if config.num_speculative_tokens else None
    constrained = None if constraints is None else ConstrainedSteps(pool, constraints, config)
    every: tuple[SchedulerPart | None, ...] = (
        FaultIsolation(pool, preemptor, in_flight, aborts, explanations),
        Deadlines(aborts),
        explanations,
        DecodeSteps(pool, config) if config.num_decode_steps > 1 else None,
        speculator,
        constrained,  # what a grammar forces replaces other drafts
        encoder,
        adapters,
        partial,
        None if transfers is None else TransferRule(pool, transfers),
        SharedStates(pool) if kv_cache.shares_states else None,
        QueueLimits(pool, config),
        SLOAttainment(config, pool.counters),
        PoolStatistics(pool),
        PromptChanges(pool),
    )
    parts.join(part for part in every if part is not None)
    batching = MixedBatching if config.batching == "mixed" else PrefillFirstBatching
    return Scheduler(
        config=config,
        parts=parts,
        pool=pool,
        in_flight_steps=in_flight,
        batching=batching(
            pool,
            RunningScheduler(
                pool,
                preemptor,
                config,
                encoder,
                part_of=micro_batches.part_of,
                share=PromptShares(pool, config.max_num_seqs).limit,
            ),
            waiting,
            explanations,
            make_room=ForcedPreemption(pool, preemptor, waiting, adapters, partial, config).preempt,
            delay_factor=config.prefill_delay_factor,
        ),
        waiting=waiting,
        preemptor=preemptor,
        aborts=aborts,
        output_processor=StepOutputProcessor(pool, config.max_model_len, parts, draft_method),
        feedback=StepFeedback(pool, rule, token_budget or make_token_budget(config), micro_batches),
        explanations=explanations,
    )
