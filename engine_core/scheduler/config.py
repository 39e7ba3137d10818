"""A scheduler's settings, under their options' names: declared, documented and checked here."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, get_args

PolicyName = Literal["fcfs", "priority", "fair"]
BatchingName = Literal["mixed", "prefill-first"]
PreemptionModeName = Literal["default", "recompute", "swap", "auto"]

_MINIMUM = {
    "max_num_batched_tokens": 1,
    "max_num_shared_tokens": 1,
    "max_num_seqs": 1,
    "max_model_len": 2,
    "max_chunk_size": 1,
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "num_lookahead_slots": 0,
    "num_speculative_tokens": 0,
    "max_num_drafts": 0,
    "num_decode_steps": 1,
    "max_queued_requests": 1,
    "max_queued_tokens": 1,
    "max_num_adapters": 1,
    "max_num_encoder_input_tokens": 0,
    "encoder_cache_size": 0,
    "max_steps_in_flight": 1,
    "pipeline_parallel_size": 1,
    "min_micro_batch_tokens": 1,
    "priority_min_gain": 1,
    "prefill_delay_factor": 0,
}
_ABOVE_ZERO = ("priority_ageing_s", "slo_tpot_ms", "slo_ttft_ms")
_CHOICES = {
    "scheduling_policy": get_args(PolicyName),
    "batching": get_args(BatchingName),
    "preemption_mode": get_args(PreemptionModeName),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Resolved values: None is "no limit" or "off", never "auto".
    Raises ValueError: a value outside its limits, or one that has no effect beside the others."""

    max_num_batched_tokens: int
    """Most tokens of a step."""
    max_num_seqs: int
    """Most sequences running at once."""
    max_model_len: int
    """Most tokens of a sequence, prompt and output."""
    max_num_shared_tokens: int | None = None
    """Most tokens of a step while there are several requests; None: as when one is alone."""
    max_chunk_size: int | None = None
    """Most tokens of one sequence in a step."""
    scheduling_policy: PolicyName = "fair"
    """Which request is admitted next and which is preempted; "fair" between clients."""
    batching: BatchingName = "mixed"
    """Whether prefill and decode share a step."""
    prefill_delay_factor: float = 0.0
    """Batching prefill-first: prompts wait this many times the last prefill step's duration."""
    preemption_mode: PreemptionModeName = "default"
    """What happens to the blocks of a preempted request: "default" recomputes one sequence and
    swaps several, "auto" takes what is measured to be cheaper."""
    force_preemption: bool = True
    """Policy priority: a more urgent request takes a running one's place if none is free."""
    priority_min_gain: int = 1
    """Policy priority: by how much it must be more urgent."""
    priority_ageing_s: float | None = None
    """Policy priority: seconds of waiting that lower the effective priority by one."""
    tenant_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Policy fair: shares by tenant; 1 for all others."""
    slo_tpot_ms: float | None = None
    """Milliseconds per output token to keep; the step's token budget follows from it."""
    slo_ttft_ms: float | None = None
    """Milliseconds to the first token to keep, weighed against `slo_tpot_ms`."""
    max_num_partial_prefills: int | None = None
    """Most prompts partly computed at once."""
    max_long_partial_prefills: int | None = None
    """Most long prompts partly computed at once."""
    long_prefill_token_threshold: int | None = None
    """A prompt of more tokens is long, for `max_long_partial_prefills`."""
    max_queued_requests: int | None = None
    """A new request is refused while this many wait."""
    max_queued_tokens: int | None = None
    """A new request is refused if the queue's prompt and output tokens would be more than this."""
    num_lookahead_slots: int = 0
    """Slots allocated behind each sequence's tokens."""
    num_speculative_tokens: int = 0
    """Most drafts of a sequence in a step, of those that a proposer makes; 0: there is none."""
    max_num_drafts: int = 256
    """Most drafts of a step: each has a row of logits."""
    num_decode_steps: int = 1
    """Most decode steps of a plan, as far as lookahead slots last."""
    max_num_adapters: int | None = None
    """Most adapters in use at once."""
    loads_adapters: bool = False
    """A request waits until `AdapterSlots.on_loaded` says that its adapter's weights are loaded."""
    max_num_encoder_input_tokens: int = 0
    """Rows of encoders' outputs that a step makes at most; 0: the model takes text alone."""
    encoder_cache_size: int = 0
    """Rows of encoders' outputs that are kept at most."""
    disable_chunked_mm_input: bool = False
    """All of an input is computed in one step: the model attends to it in both directions."""
    max_steps_in_flight: int = 1
    """Most steps planned and not updated; as many as the executor runs."""
    computes_in_order: bool = True
    """Whether a step computes its requests in their order, those of one token first: else none may
    start from a recurrent layer's state that another leaves in the same step."""
    pipeline_parallel_size: int = 1
    """Stages, each of which has a step of its own."""
    min_micro_batch_tokens: int = 256
    """With several stages prompts are not cut into shorter chunks to keep all of them at work."""

    def __post_init__(self) -> None:
        self._check_values()
        self._check_combinations()

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence in a step, drafts aside."""
        budget = self.max_num_batched_tokens
        return budget if self.max_chunk_size is None else min(self.max_chunk_size, budget)

    def _check_values(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"{name} is {value!r}, it must be one of {', '.join(choices)}; "
                    f"change {_option(name)}"
                )
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if value is not None and not minimum <= value < math.inf:
                raise ValueError(
                    f"{name} is {value}, it must be at least {minimum}; raise {_option(name)}"
                )
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}, it must be above 0; raise {_option(name)}")
        for tenant, weight in self.tenant_weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(
                    f"the weight of tenant {tenant!r} is {weight}, it must be above 0; 1 is a full "
                    "share; change --tenant-weight"
                )

    def _check_combinations(self) -> None:
        policy = self.scheduling_policy
        for needed, names in (
            ("priority", ("force_preemption", "priority_min_gain", "priority_ageing_s")),
            ("fair", ("tenant_weights",)),
        ):
            for name in names:
                if policy != needed and self._is_changed(name):
                    raise ValueError(
                        f"{_option(name)} has no effect with --scheduling-policy {policy}; omit it "
                        f"or use --scheduling-policy {needed}"
                    )
        if not self.force_preemption and self._is_changed("priority_min_gain"):
            raise ValueError(
                "--priority-min-gain has no effect with --no-force-preemption; omit one of them"
            )
        if self.prefill_delay_factor and self.batching != "prefill-first":
            raise ValueError(
                f"--prefill-delay-factor has no effect with --batching {self.batching}; omit it "
                "or use prefill-first"
            )
        if self.slo_ttft_ms is not None and self.slo_tpot_ms is None:
            raise ValueError(
                "--slo-ttft-ms has no effect without --slo-tpot-ms; give both or omit it"
            )
        most_shared = self.max_num_shared_tokens
        if most_shared is not None and self.slo_tpot_ms is not None:
            raise ValueError(
                f"--max-num-shared-tokens is {most_shared}, and --slo-tpot-ms chooses how many "
                "tokens each step has; omit one of them"
            )
        if most_shared is not None and most_shared > self.max_num_batched_tokens:
            raise ValueError(
                f"--max-num-shared-tokens is {most_shared}, above --max-num-batched-tokens "
                f"{self.max_num_batched_tokens}; lower it"
            )
        if self.num_decode_steps > 1 and self.slo_tpot_ms is not None:
            raise ValueError(
                f"--num-decode-steps is {self.num_decode_steps}, and --slo-tpot-ms chooses what "
                "each step computes; omit one of them"
            )
        if self.num_decode_steps > 1 and self.num_speculative_tokens:
            raise ValueError(
                f"--num-decode-steps is {self.num_decode_steps}, and --speculative verifies drafts "
                "in plans of one step; omit one of them"
            )
        if self.num_decode_steps > 1 and self.max_steps_in_flight > 1:
            raise ValueError(
                f"--num-decode-steps is {self.num_decode_steps}, and on a GPU each step is planned "
                "while the one before it runs, which hides the same time, as in each stage of a "
                "pipeline; omit it, or run with --device cpu and without --pipeline-parallel-size"
            )
        if self.pipeline_parallel_size not in (1, self.max_steps_in_flight):
            raise ValueError(
                f"--pipeline-parallel-size is {self.pipeline_parallel_size}, and "
                f"{self.max_steps_in_flight} steps may be in flight; make them equal"
            )
        most, most_long = self.max_num_partial_prefills, self.max_long_partial_prefills
        if (most_long is None) != (self.long_prefill_token_threshold is None):
            raise ValueError(
                "--max-long-partial-prefills and --long-prefill-token-threshold have no effect one "
                "without the other; give both or neither"
            )
        if most is not None and most_long is not None and most_long > most:
            raise ValueError(
                f"--max-long-partial-prefills is {most_long}, above --max-num-partial-prefills "
                f"{most}; lower it"
            )

    def _is_changed(self, name: str) -> bool:
        return bool(getattr(self, name) != _DEFAULTS[name])


_DEFAULTS = {
    field.name: field.default_factory()
    if field.default_factory is not dataclasses.MISSING
    else field.default
    for field in dataclasses.fields(SchedulerConfig)
}


def _option(name: str) -> str:
    if name == "tenant_weights":
        return "--tenant-weight"
    return f"--{'no-' if name == 'force_preemption' else ''}{name.replace('_', '-')}"
