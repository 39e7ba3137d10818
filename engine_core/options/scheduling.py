"""The daemon's options that say who runs when. Must not import torch: `--help` reads this.

None means "not given": what it becomes then is settled in `engine_core.startup.resolve`. An
option that could have no effect beside the others is refused, so that nobody waits for what cannot
come.
"""

import dataclasses
from typing import Annotated, Literal

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    option,
    parse_weight,
)

_Count = int | None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingOptions:
    max_num_batched_tokens: Annotated[
        _Count,
        option(
            "Most tokens a step; default: 128 on a CPU with float32 weights, 256 with "
            "quantised ones, 8192 on a GPU.",
            "Scheduler",
            validator=AT_LEAST_ONE,
        ),
    ] = None
    max_num_seqs: Annotated[
        _Count,
        option(
            "Most sequences running at once; default: 128 on a CPU, 256 on a GPU.",
            "Scheduler",
            validator=AT_LEAST_ONE,
        ),
    ] = None
    max_chunk_size: Annotated[
        _Count,
        option(
            "Most prompt tokens of one request a step; default: the step's budget.",
            "Scheduler",
            validator=AT_LEAST_ONE,
        ),
    ] = None
    max_num_partial_prefills: Annotated[
        _Count,
        option(
            "Most prompts that are computed in part at once; default: no limit.",
            "Scheduler",
            validator=AT_LEAST_ONE,
        ),
    ] = None
    max_long_partial_prefills: Annotated[
        _Count,
        option(
            "Of those, most that are longer than --long-prefill-token-threshold.",
            "Scheduler",
            validator=AT_LEAST_ONE,
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        _Count,
        option("Prompts of more tokens are long.", "Scheduler", validator=AT_LEAST_ONE),
    ] = None
    batching: Annotated[
        Literal["mixed", "prefill-first"],
        option(
            "mixed: prompts and running requests share each step; prefill-first: a step is one "
            "or the other.",
            "Scheduler",
        ),
    ] = "mixed"
    prefill_delay_factor: Annotated[
        float | None,
        option(
            "prefill-first: prompts wait for so many times the last prompt step's time.",
            "Scheduler",
            validator=AT_LEAST_ZERO,
        ),
    ] = None
    slo_tpot_ms: Annotated[
        float | None,
        option(
            "Milliseconds a token that running requests shall keep; each step's budget follows.",
            "Scheduler",
            validator=ABOVE_ZERO,
        ),
    ] = None
    slo_ttft_ms: Annotated[
        float | None,
        option(
            "Milliseconds to the first token that shall be kept, where both cannot.",
            "Scheduler",
            validator=ABOVE_ZERO,
        ),
    ] = None
    preemption_mode: Annotated[
        Literal["default", "recompute", "swap", "auto"],
        option(
            "What happens to a preempted request's KV blocks. default: recompute one sequence, "
            "swap several; auto: what costs less.",
            "Scheduler",
        ),
    ] = "default"
    max_queued_requests: Annotated[
        _Count,
        option(
            "Refuse requests while so many wait; default: no limit.",
            "Scheduler",
            validator=AT_LEAST_ONE,
        ),
    ] = None
    max_queued_tokens: Annotated[
        _Count,
        option(
            "Refuse a request with which more tokens than this would wait; default: no limit.",
            "Scheduler",
            validator=AT_LEAST_ONE,
        ),
    ] = None

    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "fair"],
        option(
            "Who is next. fcfs: first come, first served; priority: the smallest number; fair: "
            "the tenant that was served least.",
            "Policy",
        ),
    ] = "fcfs"
    force_preemption: Annotated[
        bool | None,
        option(
            "priority: an urgent request takes the place of a running one. Default: yes.", "Policy"
        ),
    ] = None
    priority_min_gain: Annotated[
        _Count,
        option(
            "priority: by how much it must outrank the running one; default: 1.",
            "Policy",
            validator=AT_LEAST_ONE,
        ),
    ] = None
    priority_ageing_s: Annotated[
        float | None,
        option(
            "priority: seconds of waiting that count as one step of priority; default: none.",
            "Policy",
            validator=ABOVE_ZERO,
        ),
    ] = None
    tenant_weight: Annotated[
        tuple[str, ...],
        option(
            "fair: NAME=W gives a tenant W times the share of others; may be repeated.",
            "Policy",
            negative="",
            show_default=False,
        ),
    ] = ()

    def tenant_weights(self) -> dict[str, float]:
        """
        Raises:
            ConfigurationError: one that is not NAME=WEIGHT, or a name twice.
        """
        weights: dict[str, float] = {}
        for text in self.tenant_weight:
            try:
                name, weight = parse_weight(text)
            except ValueError as error:
                raise ConfigurationError(f"--tenant-weight: {error}") from None
            if name in weights:
                raise ConfigurationError(f"--tenant-weight names {name!r} twice; give it once")
            weights[name] = weight
        return weights

    def check_scheduling(self) -> None:
        """
        Raises:
            ConfigurationError: an option without effect, or a pair that cannot work.
        """
        self._check_policy()
        if self.slo_ttft_ms is not None and self.slo_tpot_ms is None:
            raise ConfigurationError(
                "--slo-ttft-ms has no effect without --slo-tpot-ms; give both or omit it"
            )
        if self.prefill_delay_factor is not None and self.batching != "prefill-first":
            raise ConfigurationError(
                f"--prefill-delay-factor has no effect with --batching "
                f"{self.batching}; omit it or use prefill-first"
            )
        if (self.max_long_partial_prefills is None) != (self.long_prefill_token_threshold is None):
            raise ConfigurationError(
                "--max-long-partial-prefills and --long-prefill-token-threshold have no effect one "
                "without the other; give both or neither"
            )
        most, most_long = self.max_num_partial_prefills, self.max_long_partial_prefills
        if most is not None and most_long is not None and most_long > most:
            raise ConfigurationError(
                f"--max-long-partial-prefills is {most_long}, above --max-num-partial-prefills "
                f"{most}; lower it"
            )
        self.tenant_weights()

    def _check_policy(self) -> None:
        belongs_to = {
            "--force-preemption": ("priority", self.force_preemption is not None),
            "--priority-min-gain": ("priority", self.priority_min_gain is not None),
            "--priority-ageing-s": ("priority", self.priority_ageing_s is not None),
            "--tenant-weight": ("fair", bool(self.tenant_weight)),
        }
        for name, (policy, is_given) in belongs_to.items():
            if is_given and self.scheduling_policy != policy:
                raise ConfigurationError(
                    f"{name} has no effect with --scheduling-policy {self.scheduling_policy}; "
                    f"omit it or use --scheduling-policy {policy}"
                )
        if self.force_preemption is False and self.priority_min_gain is not None:
            raise ConfigurationError(
                "--priority-min-gain has no effect with --no-force-preemption; omit one of them"
            )
