"""The options of the command line, in groups, and the parts that they make. Picklable, so that a
planner's processes can make the same parts again.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from engine_core.scheduler import SchedulerConfig
from scripts.simulator import arrivals
from scripts.simulator.engine import CacheSize
from scripts.simulator.errors import SimulationError
from scripts.simulator.fitted import NoisyModel
from scripts.simulator.lengths import parse_lengths, read_pairs
from scripts.simulator.records import fit_record
from scripts.simulator.request_metrics import ServiceTargets
from scripts.simulator.roofline import HARDWARE, SHAPES, Roofline
from scripts.simulator.routing import Router
from scripts.simulator.step_work import StepModel
from scripts.simulator.synthetic import Chats, SharedPrefixes, SyntheticTrace
from scripts.simulator.trace import ShapedTrace, Trace
from scripts.simulator.trace_files import TraceFile

_SYNTHETIC_ONLY = (
    "rate",
    "arrivals",
    "burstiness",
    "swing",
    "period",
    "prompt_len",
    "output_len",
    "length_pairs",
    "prefixes",
    "prefix_len",
    "prefix_zipf",
    "turns",
    "think",
    "tenants",
)


@Parameter(name="*", group="Trace")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What is asked of the engines."""

    trace: Annotated[Path | None, Parameter(help="A file; default: a synthetic trace.")] = None
    trace_format: Annotated[
        Literal["azure", "mooncake", "burstgpt"] | None, Parameter(help="Of the file.")
    ] = None
    rate: Annotated[float, Parameter(help="Synthetic: mean arrivals a second.")] = 4.0
    arrivals: Annotated[
        Literal["poisson", "gamma", "diurnal"], Parameter(help="Synthetic: how they come.")
    ] = "poisson"
    burstiness: Annotated[
        float, Parameter(help="Gamma: coefficient of variation of the gaps, 1 is Poisson.")
    ] = 2.0
    swing: Annotated[float, Parameter(help="Diurnal: share by which the rate rises, falls.")] = 0.5
    period: Annotated[float, Parameter(help="Diurnal: seconds.")] = 3600.0
    prompt_len: Annotated[
        str, Parameter(help="Tokens: 512, uniform:A:B, log-uniform:A:B, lognormal:MEDIAN:SIGMA:MAX")
    ] = "log-uniform:32:2048"
    output_len: Annotated[str, Parameter(help="Likewise.")] = "log-uniform:16:512"
    length_pairs: Annotated[
        Path | None, Parameter(help="Lines `prompt,output` to draw lengths from, instead.")
    ] = None
    prefixes: Annotated[int, Parameter(help="So many system prompts are shared; 0: none.")] = 0
    prefix_len: Annotated[int, Parameter(help="Tokens of each, besides the prompt's own.")] = 512
    prefix_zipf: Annotated[float, Parameter(help="Exponent of their popularity.")] = 1.0
    turns: Annotated[float, Parameter(help="Mean turns of a chat; 1: no chats.")] = 1.0
    think: Annotated[float, Parameter(help="Mean seconds between answer and next turn.")] = 10.0
    tenants: Annotated[int, Parameter(help="Share the requests among so many tenants.")] = 0
    num_requests: Annotated[
        int | None, Parameter(help="End after so many; default: 1000, of a file all.")
    ] = None
    rate_scale: Annotated[float, Parameter(help="Arrivals so many times as fast.")] = 1.0
    skip: Annotated[float, Parameter(help="Leave out the trace's first seconds.")] = 0.0
    duration: Annotated[
        float | None, Parameter(help="Of the trace's own clock: take so many seconds of it.")
    ] = None
    delay: Annotated[float, Parameter(help="Shift all arrivals by seconds.")] = 0.0
    seed: Annotated[int, Parameter(help="Of all that is random.")] = 0

    @property
    def has_chats(self) -> bool:
        """Whether a request may have later turns."""
        return self.turns != 1

    def make(self, max_model_len: int) -> Trace:
        """
        Raises:
            SimulationError: a value outside its limits.
        """
        if self.seed < 0:
            raise SimulationError(f"--seed is {self.seed}, it must be at least 0")
        if (self.trace is None) != (self.trace_format is None):
            given, missing = ("--trace", "--trace-format")[:: 1 if self.trace else -1]
            raise SimulationError(f"{given} is given without {missing}; give both or neither")
        self._refuse_idle_options()
        if self.trace is not None and self.trace_format is not None:
            trace: Trace = TraceFile(self.trace, self.trace_format)
            max_requests = self.num_requests
        else:
            trace, max_requests = self._synthetic(max_model_len), None
        return ShapedTrace(
            trace,
            rate_scale=self.rate_scale,
            skip_s=self.skip,
            duration_s=self.duration,
            max_requests=max_requests,
            delay_s=self.delay,
        )

    def _refuse_idle_options(self) -> None:
        """What would be accepted and do nothing."""
        idle: dict[str, tuple[str, ...]] = {}
        if self.trace is not None:
            idle["--trace is given"] = _SYNTHETIC_ONLY
        if self.arrivals != "gamma":
            idle["--arrivals is not gamma"] = ("burstiness",)
        if self.arrivals != "diurnal":
            idle["--arrivals is not diurnal"] = ("swing", "period")
        if self.length_pairs is not None:
            idle["--length-pairs is given"] = ("prompt_len", "output_len")
        if not self.prefixes:
            idle["--prefixes is 0"] = ("prefix_len", "prefix_zipf")
        if self.turns == 1:
            idle["--turns is 1"] = ("think",)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for because, names in idle.items():
            for name in names:
                if getattr(self, name) != defaults[name]:
                    raise SimulationError(
                        f"--{name.replace('_', '-')} is {getattr(self, name)} and does nothing, as "
                        f"{because}; leave it out"
                    )

    def _synthetic(self, max_model_len: int) -> SyntheticTrace:
        streams = {
            "poisson": functools.partial(arrivals.poisson, self.rate),
            "gamma": functools.partial(arrivals.gamma, self.rate, self.burstiness),
            "diurnal": functools.partial(arrivals.diurnal, self.rate, self.swing, self.period),
        }
        return SyntheticTrace(
            arrivals=streams[self.arrivals],
            prompt_lengths=parse_lengths("--prompt-len", self.prompt_len),
            output_lengths=parse_lengths("--output-len", self.output_len),
            num_requests=1000 if self.num_requests is None else self.num_requests,
            seed=self.seed,
            prefixes=SharedPrefixes(self.prefixes, self.prefix_len, self.prefix_zipf)
            if self.prefixes
            else None,
            chats=Chats(self.turns, self.think, max_model_len // 2) if self.turns != 1 else None,
            length_pairs=None if self.length_pairs is None else read_pairs(self.length_pairs),
            num_tenants=self.tenants,
        )


@Parameter(name="*", group="Engine")
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Each engine's settings, named as the daemon's."""

    max_num_batched_tokens: Annotated[int, Parameter(help="A step's token budget.")] = 2048
    max_num_seqs: Annotated[int, Parameter(help="Most requests running at once.")] = 256
    max_model_len: Annotated[int, Parameter(help="Most tokens of a request.")] = 131_072
    max_chunk_size: Annotated[int | None, Parameter(help="Of one prompt in a step.")] = None
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    batching: Literal["mixed", "prefill-first"] = "mixed"
    prefill_delay_factor: float = 0.0
    preemption_mode: Literal["default", "recompute", "swap", "auto"] = "default"
    slo_tpot_ms: Annotated[float | None, Parameter(help="Lets the budget vary.")] = None
    slo_ttft_ms: Annotated[float | None, Parameter(help="Likewise.")] = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    num_blocks: Annotated[
        int | None, Parameter(help="KV blocks; default: what the memory leaves.")
    ] = None
    num_host_blocks: Annotated[int, Parameter(help="KV blocks in host memory.")] = 0
    block_size: Annotated[int, Parameter(help="Tokens a block.")] = 16
    prefix_caching: Annotated[bool, Parameter(help="Reuse equal prefixes.")] = True

    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_chunk_size=self.max_chunk_size,
            scheduling_policy=self.scheduling_policy,
            batching=self.batching,
            prefill_delay_factor=self.prefill_delay_factor,
            preemption_mode=self.preemption_mode,
            slo_tpot_ms=self.slo_tpot_ms,
            slo_ttft_ms=self.slo_ttft_ms,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
        )

    def cache(self, step_times: "StepTimeOptions") -> CacheSize:
        num_blocks = self.num_blocks
        if num_blocks is None:
            num_blocks = step_times.roofline(self.block_size).num_blocks()
        return CacheSize(
            num_blocks=num_blocks,
            block_size=self.block_size,
            enable_prefix_caching=self.prefix_caching,
            num_host_blocks=self.num_host_blocks,
        )


@Parameter(name="*", group="Step times")
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimeOptions:
    """How long steps take."""

    hardware: Annotated[Literal[tuple(HARDWARE)], Parameter(help="Roofline of.")] = "h200"  # type: ignore[valid-type]
    model: Annotated[Literal[tuple(SHAPES)], Parameter(help="Its shapes.")] = "llama-3.1-8b"  # type: ignore[valid-type]
    step_overhead_ms: Annotated[float, Parameter(help="Added to every step.")] = 0.0
    fitted: Annotated[
        Path | None, Parameter(help="Fit the daemon's record instead (--trace FILE).")
    ] = None
    noise: Annotated[
        bool, Parameter(help="Fitted: draw deviations from those of the fit.", negative="")
    ] = False

    def roofline(self, block_size: int) -> Roofline:
        if self.step_overhead_ms < 0:
            raise SimulationError(
                f"--step-overhead-ms is {self.step_overhead_ms}, it must be at least 0"
            )
        hardware = dataclasses.replace(
            HARDWARE[self.hardware], overhead_s=self.step_overhead_ms / 1000
        )
        return Roofline(hardware, SHAPES[self.model], block_size)

    def make(self, block_size: int, seed: int) -> StepModel:
        if self.fitted is not None and self.step_overhead_ms:
            raise SimulationError(
                f"--step-overhead-ms is {self.step_overhead_ms} and does nothing with --fitted, "
                "whose steps are whole; leave it out"
            )
        if self.fitted is None:
            if self.noise:
                raise SimulationError("--noise needs --fitted: a roofline has no deviations")
            return self.roofline(block_size)
        model = fit_record(self.fitted)
        return NoisyModel(model, seed) if self.noise else model


@Parameter(name="*", group="Fleet")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Engines and what is promised of them."""

    engines: Annotated[int, Parameter(help="Engines behind the router.")] = 1
    router: Literal["round-robin", "random", "least-loaded", "cache-aware", "sticky"] = (
        "round-robin"
    )
    router_view_ms: Annotated[
        float, Parameter(help="The router looks at loads so often; 0: it always knows them.")
    ] = 0.0
    slo_ttft_ms: Annotated[float | None, Parameter(help="Goodput: promised TTFT.")] = None
    slo_tpot_ms: Annotated[float | None, Parameter(help="Goodput: promised TPOT.")] = None
    max_duration: Annotated[
        float | None, Parameter(help="Break off after seconds of virtual time.")
    ] = None

    def view_s(self, router: Router) -> float:
        """
        Raises:
            SimulationError: out of its limits, or of no effect.
        """
        if not (self.router_view_ms >= 0 and math.isfinite(self.router_view_ms)):
            raise SimulationError(
                f"--router-view-ms is {self.router_view_ms}, it must be at least 0"
            )
        if self.router_view_ms and not router.reads_loads:
            raise SimulationError(
                f"--router-view-ms is {self.router_view_ms} and does nothing with --router "
                f"{self.router}, which reads no loads; leave it out"
            )
        return self.router_view_ms / 1000

    def targets(self) -> ServiceTargets:
        for name, value in (("ttft", self.slo_ttft_ms), ("tpot", self.slo_tpot_ms)):
            if value is not None and not value > 0:
                raise SimulationError(f"--slo-{name}-ms is {value}, it must be above 0")
        ttft, tpot = (
            None if value is None else value / 1000
            for value in (self.slo_ttft_ms, self.slo_tpot_ms)
        )
        return ServiceTargets(ttft, tpot)
