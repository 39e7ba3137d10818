"""The scheduler's options, by the names of `SchedulerConfig`, which checks them. None means "not
given": what it becomes then is the model's or the device's, or SchedulerConfig's."""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import ADVANCED_SCHEDULING, SCHEDULING, option

if TYPE_CHECKING:
    from engine_core.scheduler import SchedulerConfig


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingOptions:
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            "Most tokens of a step; default: 128 on a CPU with float32 weights, 256 with "
            "quantised ones, 8192 on a GPU.",
            SCHEDULING,
            is_common=True,
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        option(
            "Most sequences running at once; default: 128 on a CPU, 256 on a GPU.",
            SCHEDULING,
            is_common=True,
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "fair"],
        option(
            "Which request is next. fair: of the least served client or tenant; fcfs: first come, "
            "first served; priority: the smallest number.",
            SCHEDULING,
            is_common=True,
        ),
    ] = "fair"
    tenant_weight: Annotated[
        tuple[str, ...],
        option(
            "fair: NAME=W gives a tenant W times the share of others; may be repeated.",
            SCHEDULING,
            negative="",
            show_default=False,
        ),
    ] = ()
    slo_tpot_ms: Annotated[
        float | None,
        option(
            "Milliseconds per output token to keep; each step's token budget follows from it.",
            SCHEDULING,
        ),
    ] = None
    slo_ttft_ms: Annotated[
        float | None,
        option(
            "Milliseconds to the first token to keep, weighed against --slo-tpot-ms.", SCHEDULING
        ),
    ] = None
    preemption_mode: Annotated[
        Literal["default", "recompute", "swap", "auto"],
        option(
            "What happens to a preempted request's KV blocks. default: recompute one sequence, "
            "swap several; auto: what costs less.",
            SCHEDULING,
        ),
    ] = "default"
    max_queued_requests: Annotated[
        int | None, option("Refuse requests while this many wait.", SCHEDULING)
    ] = 65_536
    max_queued_tokens: Annotated[
        int | None,
        option(
            "Refuse a request with which more tokens than this would wait; default: no limit.",
            SCHEDULING,
        ),
    ] = None
    batching: Annotated[
        Literal["mixed", "prefill-first"],
        option(
            "mixed: prefill and decode share each step; prefill-first: a step is one or the other.",
            ADVANCED_SCHEDULING,
        ),
    ] = "mixed"
    prefill_delay_factor: Annotated[
        float | None,
        option(
            "prefill-first: prompts wait this many times the last prefill step's duration.",
            ADVANCED_SCHEDULING,
        ),
    ] = None
    max_chunk_size: Annotated[
        int | None,
        option(
            "Most prompt tokens of one request in a step; default: the step's token budget.",
            ADVANCED_SCHEDULING,
        ),
    ] = None
    max_num_partial_prefills: Annotated[
        int | None,
        option("Most prompts partly computed at once; default: no limit.", ADVANCED_SCHEDULING),
    ] = None
    max_long_partial_prefills: Annotated[
        int | None,
        option(
            "Of those, most that are longer than --long-prefill-token-threshold.",
            ADVANCED_SCHEDULING,
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        int | None, option("Prompts of more tokens are long.", ADVANCED_SCHEDULING)
    ] = None
    num_decode_steps: Annotated[
        int | None,
        option(
            "Most decode steps of one plan; 1 by itself with stop strings, logprobs, beams and "
            "waiting requests. CPU only; default: 1.",
            ADVANCED_SCHEDULING,
        ),
    ] = None
    force_preemption: Annotated[
        bool | None,
        option(
            "priority: a more urgent request takes a running one's place if none is free. "
            "Default: yes.",
            ADVANCED_SCHEDULING,
        ),
    ] = None
    priority_min_gain: Annotated[
        int | None,
        option("priority: by how much it must be more urgent; default: 1.", ADVANCED_SCHEDULING),
    ] = None
    priority_ageing_s: Annotated[
        float | None,
        option(
            "priority: seconds of waiting that count as one step of priority; default: none.",
            ADVANCED_SCHEDULING,
        ),
    ] = None

    def check(self) -> None:
        """Imports the scheduler.
        Raises ConfigurationError: a value outside its limits, or an option without effect."""
        self.resolve(max_num_batched_tokens=2**31, max_num_seqs=2**31, max_model_len=2**31)

    def resolve(self, **resolved: Any) -> "SchedulerConfig":
        """The scheduler's settings: what was given, else `resolved`, else SchedulerConfig's own.
        Raises ConfigurationError: as `check`."""
        from engine_core.scheduler import SchedulerConfig

        given = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        given["tenant_weights"] = self._parse_weights(given.pop("tenant_weight"))
        try:
            return SchedulerConfig(**{**resolved, **given})
        except ValueError as error:
            raise ConfigurationError(str(error)) from error

    @staticmethod
    def _parse_weights(texts: tuple[str, ...]) -> dict[str, float]:
        weights: dict[str, float] = {}
        for text in texts:
            name, separator, number = text.rpartition("=")
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            if not (separator and name and 0 < weight < math.inf):
                raise ConfigurationError(
                    f"--tenant-weight: {text!r} is not NAME=WEIGHT with a weight above 0, such as "
                    "batch=0.5"
                )
            if name in weights:
                raise ConfigurationError(f"--tenant-weight names {name!r} twice; give it once")
            weights[name] = weight
        return weights
