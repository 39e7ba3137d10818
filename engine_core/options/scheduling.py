"""The scheduler's options, by the names of `SchedulerConfig`, which checks them. None means "not
given": what it becomes then is the model's or the device's, or SchedulerConfig's."""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import ADVANCED_SCHEDULING, COMMON, SCHEDULING

if TYPE_CHECKING:
    from engine_core.scheduler import SchedulerConfig


@Parameter(name="*", group=SCHEDULING.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingOptions:
    max_num_batched_tokens: Annotated[int | None, COMMON] = None
    """Most tokens of a step; default: 512 on a CPU with float32 weights, 256 with quantised
    or bfloat16 ones, 8192 on a GPU."""
    max_num_seqs: Annotated[int | None, COMMON] = None
    """Most sequences running at once; default: 128 on a CPU, 256 on a GPU."""
    scheduling_policy: Annotated[Literal["fcfs", "priority", "fair"], COMMON] = "fair"
    """Which request is next. fair: of the least served client or tenant; fcfs: first come,
    first served; priority: the smallest number."""
    tenant_weight: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """fair: NAME=W gives a tenant W times the share of others; may be repeated."""
    slo_tpot_ms: float | None = None
    """Milliseconds per output token to keep; each step's token budget follows from it."""
    slo_ttft_ms: float | None = None
    """Milliseconds to the first token to keep, weighed against --slo-tpot-ms."""
    preemption_mode: Literal["default", "recompute", "swap", "auto"] = "default"
    """What happens to a preempted request's KV blocks. default: recompute one sequence, swap
    several; auto: what costs less."""
    max_queued_requests: int | None = 65_536
    """Refuse requests while this many wait."""
    max_queued_tokens: int | None = None
    """Refuse a request with which more tokens than this would wait; default: no limit."""
    batching: Annotated[Literal["mixed", "prefill-first"], ADVANCED_SCHEDULING] = "mixed"
    """mixed: prefill and decode share each step; prefill-first: a step is one or the other."""
    prefill_delay_factor: Annotated[float | None, ADVANCED_SCHEDULING] = None
    """prefill-first: prompts wait this many times the last prefill step's duration."""
    max_num_shared_tokens: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """Most tokens of a step while there are several requests, so that none waits long for
    another's; default: 128 on a CPU with float32 weights, else --max-num-batched-tokens."""
    max_chunk_size: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """Most prompt tokens of one request in a step; default: the step's token budget."""
    max_num_partial_prefills: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """Most prompts partly computed at once; default: no limit."""
    max_long_partial_prefills: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """Of those, most that are longer than --long-prefill-token-threshold."""
    long_prefill_token_threshold: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """Prompts of more tokens are long."""
    max_num_encoder_input_tokens: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """Most tokens that images and sounds encoded in a step may become; default: a step's
    tokens, or the model's largest image."""
    encoder_cache_size: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """Most tokens of encoded images and sounds that are kept for requests with equal ones;
    default: 8192, or a step's."""
    num_decode_steps: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """Most decode steps of one plan; 1 by itself with stop strings, logprobs, beams and waiting
    requests. CPU only; default: 1."""
    force_preemption: Annotated[bool | None, ADVANCED_SCHEDULING] = None
    """priority: a more urgent request takes a running one's place if none is free. Default:
    yes."""
    priority_min_gain: Annotated[int | None, ADVANCED_SCHEDULING] = None
    """priority: by how much it must be more urgent; default: 1."""
    priority_ageing_s: Annotated[float | None, ADVANCED_SCHEDULING] = None
    """priority: seconds of waiting that count as one step of priority; default: none."""

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
