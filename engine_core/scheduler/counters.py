"""Counters of the engine, and the account of each request: why things went as they did."""

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from functools import partial

from engine_core.scheduler.plan import SchedulerOutput
from protocol.calls import STEP_TOKENS_BOUNDS
from protocol.explanations import CacheLookup, LookupEnd, Preemption, PreemptionCause
from protocol.outputs import FinishReason

_MOST_NOTED = 64
"""The last preemptions of a request that are kept in words."""


def _zeros(names: Iterable[StrEnum]) -> dict[str, int]:
    return {name.value: 0 for name in names}


@dataclasses.dataclass(slots=True)
class Counters:
    """Each is a field of EngineStatistics."""

    num_steps: int = 0
    """Steps that ran at least one token."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests at their first admission, cached ones included."""
    num_cached_prompt_tokens: int = 0
    num_host_cached_prompt_tokens: int = 0
    num_disk_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preemptions_by_swap: int = 0
    num_preemptions_forced: int = 0
    num_refused: int = 0
    num_finished: dict[str, int] = dataclasses.field(default_factory=partial(_zeros, FinishReason))
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    """Tokens of decodes, drafts included."""
    num_drafts: int = 0
    """Times that a sequence had drafts to verify."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_by_method: dict[str, int] = dataclasses.field(default_factory=Counter)
    num_accepted_tokens_by_method: dict[str, int] = dataclasses.field(default_factory=Counter)
    num_steps_by_tokens: list[int] = dataclasses.field(
        default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1)
    )
    num_lookups_by_end: dict[str, int] = dataclasses.field(
        default_factory=partial(_zeros, LookupEnd)
    )
    num_lookup_hits_by_end: dict[str, int] = dataclasses.field(
        default_factory=partial(_zeros, LookupEnd)
    )
    num_preemptions_by_cause: dict[str, int] = dataclasses.field(
        default_factory=partial(_zeros, PreemptionCause)
    )
    num_encoder_inputs: int = 0
    """Images and sounds that were encoded."""
    num_encoder_cache_hits: int = 0
    """Images and sounds whose encoder output was there already."""
    num_slo_requests: int = 0
    num_slo_met: int = 0
    num_slo_ttft_violations: int = 0
    num_slo_tpot_violations: int = 0

    def count_step(self, plan: SchedulerOutput) -> None:
        """Count a plan that has tokens."""
        num_tokens, counts = plan.total_num_scheduled_tokens, plan.batch.num_scheduled_tokens
        self.num_steps += 1
        self.num_steps_by_tokens[bisect_left(STEP_TOKENS_BOUNDS, num_tokens)] += 1
        num_decodes = len(counts)
        if plan.num_decode_steps > 1:
            num_decodes = num_tokens
        elif num_tokens > num_decodes:
            num_decodes = counts.tolist().count(1)
            drafts = plan.scheduled_spec_decode_tokens
            num_decodes += sum(1 + len(own) for own in drafts.values())
        self.num_decode_tokens += num_decodes
        self.num_prefill_tokens += num_tokens - num_decodes


@dataclasses.dataclass(slots=True)
class Account:
    """What is counted of one request: for its answers, and for those who ask where it is."""

    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at the first admission; None before it."""
    cache_lookup: CacheLookup | None = None
    """How the cache was searched then."""
    num_preemptions: int = 0
    preemptions: list[Preemption] = dataclasses.field(default_factory=list)
    """The latest preemptions, in order."""
    num_draft_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_tokens: int = 0
    """Drafts that are in the output."""
    _has_answer: bool = False
    """Whether an output was made."""

    def add_preemption(self, preemption: Preemption) -> None:
        self.num_preemptions += 1
        del self.preemptions[: -_MOST_NOTED + 1]
        self.preemptions.append(preemption)

    def take_num_cached_tokens(self) -> int | None:
        """`num_cached_tokens` for a request's first output, None for each other."""
        has_answer, self._has_answer = self._has_answer, True
        return None if has_answer else self.num_cached_tokens
