"""The options of the command line, in groups, and the parts that they make. Picklable: the
planner's processes make the same parts again."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import SchedulerConfig
from frontend.cli.options import option, refuse_without_effect
from frontend.load.traces import arrivals
from frontend.load.traces.synthetic import (
    Chats,
    SharedPrefixes,
    SyntheticTrace,
    independent,
    parse_lengths,
    read_pairs,
)
from frontend.load.traces.trace import MAX_REQUESTS, TraceFile, TraceRequest, take_part
from frontend.simulator import SimulationError
from frontend.simulator.fleet import READS_LOADS
from frontend.simulator.metrics import SLO
from frontend.simulator.step_times import HARDWARE, SHAPES, NoisyModel, Roofline, StepTimeModel
from frontend.simulator.step_trace import fit_step_trace

MAX_ENGINES = 100_000
NUM_SYNTHETIC = 1000


@Parameter(name="*", group="Trace")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The requests."""

    trace: Annotated[Path | None, Parameter(help="A file; default: a synthetic trace.")] = None
    trace_format: Annotated[
        Literal["azure", "mooncake", "burstgpt"] | None, Parameter(help="Of the file.")
    ] = None
    rate: Annotated[
        float, Parameter(help="Synthetic: mean arrivals a second.", alias="--request-rate")
    ] = 4.0
    arrivals: Annotated[
        Literal["poisson", "gamma", "diurnal"], Parameter(help="Synthetic: arrival process.")
    ] = "poisson"
    burstiness: Annotated[
        float, Parameter(help="Gamma: shape, as vLLM's; 1 is Poisson, below it bursts.")
    ] = 0.25
    swing: Annotated[float, option("Diurnal: share by which the rate varies.", gte=0, lte=1)] = 0.5
    period: Annotated[float, option("Diurnal: seconds.", gt=0)] = 3600.0
    prompt_len: Annotated[
        str,
        Parameter(help="Tokens: 512, uniform:A:B, log-uniform:A:B, lognormal:MEDIAN:SIGMA:MAX"),
        Parameter(alias="--input-len"),
    ] = "log-uniform:32:2048"
    output_len: Annotated[str, Parameter(help="Tokens, in the same forms.")] = "log-uniform:16:512"
    length_pairs: Annotated[
        Path | None, Parameter(help="Lines `prompt,output` to draw lengths from, instead.")
    ] = None
    prefixes: Annotated[int, option("Number of shared system prompts.", gte=0)] = 0
    prefix_len: Annotated[int, option("Tokens of each, besides the prompt's own.", gte=1)] = 512
    prefix_zipf: Annotated[float, Parameter(help="Exponent of their popularity.")] = 1.0
    turns: Annotated[float, option("Mean turns of a chat; 1: no chats.", gte=1)] = 1.0
    think: Annotated[float, option("Mean seconds between answer and next turn.", gte=0)] = 10.0
    tenants: Annotated[int, option("Number of tenants; 0: requests have none.", gte=0)] = 0
    num_requests: Annotated[
        int | None,
        option("Most requests; default: 1000, of a file all.", gte=1, lte=MAX_REQUESTS),
        Parameter(alias="--num-prompts"),
    ] = None
    rate_scale: Annotated[float, option("Factor of the arrival rate.", gt=0)] = 1.0
    skip: Annotated[float, option("Leave out the trace's first seconds.", gte=0)] = 0.0
    duration: Annotated[float | None, option("Seconds of the trace's own clock to take.", gt=0)] = (
        None
    )
    delay: Annotated[float, option("Shift all arrivals by seconds.", gte=0)] = 0.0
    seed: Annotated[int, option("Of all that is random.", gte=0)] = 0

    def make(self, max_model_len: int) -> TraceFile | SyntheticTrace:
        """The whole trace, of which `requests` takes a part."""
        if (self.trace is None) != (self.trace_format is None):
            given, missing = ("--trace", "--trace-format")[:: 1 if self.trace else -1]
            raise SimulationError(f"{given} is given without {missing}; give both or neither")
        self._refuse_options_without_effect()
        if self.trace is not None and self.trace_format is not None:
            return TraceFile(self.trace, self.trace_format)
        return self._synthetic(max_model_len)

    def requests(self, trace: TraceFile | SyntheticTrace) -> Iterator[TraceRequest]:
        return take_part(
            trace,
            rate_scale=self.rate_scale,
            skip_s=self.skip,
            duration_s=self.duration,
            # a synthetic trace counts the later turns of chats too
            max_requests=None if self.trace is None else self.num_requests,
            delay_s=self.delay,
        )

    def _refuse_options_without_effect(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        synthetic = names[names.index("rate") : names.index("num_requests")]
        without_effect = {
            "--trace is given": synthetic if self.trace is not None else (),
            "--arrivals is not gamma": ("burstiness",) if self.arrivals != "gamma" else (),
            "--arrivals is not diurnal": ("swing", "period") if self.arrivals != "diurnal" else (),
            "--length-pairs is given": ("prompt_len", "output_len") if self.length_pairs else (),
            "--prefixes is 0": ("prefix_len", "prefix_zipf") if not self.prefixes else (),
            "--turns is 1": ("think",) if self.turns == 1 else (),
        }
        for reason, options in without_effect.items():
            refuse_without_effect(self, options, reason)

    def _synthetic(self, max_model_len: int) -> SyntheticTrace:
        processes = {
            "poisson": functools.partial(arrivals.poisson, self.rate),
            "gamma": functools.partial(arrivals.gamma, self.rate, self.burstiness),
            "diurnal": functools.partial(arrivals.diurnal, self.rate, self.swing, self.period),
        }
        lengths = independent(
            parse_lengths("--prompt-len", self.prompt_len),
            parse_lengths("--output-len", self.output_len),
        )
        return SyntheticTrace(
            arrivals=processes[self.arrivals],
            lengths=lengths if self.length_pairs is None else read_pairs(self.length_pairs),
            num_requests=NUM_SYNTHETIC if self.num_requests is None else self.num_requests,
            seed=self.seed,
            prefixes=SharedPrefixes(self.prefixes, self.prefix_len, self.prefix_zipf)
            if self.prefixes
            else None,
            chats=Chats(self.turns, self.think, max_model_len // 2) if self.turns != 1 else None,
            num_tenants=self.tenants,
        )


_Unset = Parameter(parse=False)


@Parameter(name="*", group="Engine")
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(SchedulerConfig):
    """Each engine's settings: the daemon's, but for the cache's sizes in blocks."""

    max_num_batched_tokens: Annotated[int, Parameter(help="A step's token budget.")] = 2048
    max_num_seqs: Annotated[int, Parameter(help="Most sequences running at once.")] = 256
    max_model_len: Annotated[int, Parameter(help="Most tokens of a sequence.")] = 131_072
    slo_budget: Annotated[
        bool, Parameter(help="The token budget follows --slo-tpot-ms, --slo-ttft-ms.", negative="")
    ] = False
    num_blocks: Annotated[
        int | None, Parameter(help="KV blocks; default: what the memory leaves.")
    ] = None
    num_host_blocks: Annotated[int, Parameter(help="KV blocks in host memory.")] = 0
    block_size: Annotated[int, Parameter(help="Tokens a block.")] = 16
    prefix_caching: Annotated[bool, Parameter(help="Reuse equal prefixes.")] = True

    # the fleet's SLO, if the budget follows it
    slo_tpot_ms: Annotated[float | None, _Unset] = None
    slo_ttft_ms: Annotated[float | None, _Unset] = None
    # nothing simulated has these
    tenant_weights: Annotated[Mapping[str, float], _Unset] = dataclasses.field(default_factory=dict)
    num_lookahead_slots: Annotated[int, _Unset] = 0
    num_speculative_tokens: Annotated[int, _Unset] = 0
    max_num_drafts: Annotated[int, _Unset] = 256
    num_decode_steps: Annotated[int, _Unset] = 1
    max_num_adapters: Annotated[int | None, _Unset] = None
    loads_adapters: Annotated[bool, _Unset] = False
    max_steps_in_flight: Annotated[int, _Unset] = 1
    computes_in_order: Annotated[bool, _Unset] = True
    pipeline_parallel_size: Annotated[
        int, Parameter(help="Stages that share the layers, each with a step of its own.")
    ] = 1
    min_micro_batch_tokens: Annotated[int, _Unset] = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_steps_in_flight", self.pipeline_parallel_size)
        try:
            SchedulerConfig.__post_init__(self)
        except ValueError as error:
            raise SimulationError(str(error)) from error

    def scheduler_config(self, slo: "FleetOptions") -> SchedulerConfig:
        names = [field.name for field in dataclasses.fields(SchedulerConfig)]
        settings = {name: getattr(self, name) for name in names}
        if slo.slo_tpot_ms is None:
            refuse_without_effect(self, ("slo_budget",), "there is no --slo-tpot-ms")
        elif self.slo_budget:
            settings |= {"slo_tpot_ms": slo.slo_tpot_ms, "slo_ttft_ms": slo.slo_ttft_ms}
        return SchedulerConfig(**settings)

    def make_cache(self, num_blocks: int) -> KVCacheManager:
        return KVCacheManager(
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
    tensor_parallel_size: Annotated[int, option("Devices that share each layer.", gte=1)] = 1
    step_overhead_ms: Annotated[float, option("Added to every step.", gte=0)] = 0.0
    fitted: Annotated[
        Path | None, Parameter(help="Fit the daemon's step trace instead (engine-core --trace).")
    ] = None
    noise: Annotated[
        bool | None, Parameter(help="Fitted: draw deviations from those of the fit. Default: yes.")
    ] = None

    def roofline(self, block_size: int, num_stages: int) -> Roofline:
        hardware = dataclasses.replace(
            HARDWARE[self.hardware], overhead_s=self.step_overhead_ms / 1000
        )
        return Roofline(
            hardware,
            SHAPES[self.model],
            block_size,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=num_stages,
        )

    def make(self, block_size: int, seed: int, num_stages: int) -> StepTimeModel:
        if self.fitted is not None and self.tensor_parallel_size * num_stages > 1:
            raise SimulationError(
                "--fitted has the times of one engine as it ran; omit --tensor-parallel-size and "
                "--pipeline-parallel-size"
            )
        if self.fitted is None:
            refuse_without_effect(self, ("noise",), "a roofline has no deviations, as --fitted has")
            return self.roofline(block_size, num_stages)
        refuse_without_effect(self, ("step_overhead_ms",), "the steps of --fitted are whole")
        model = fit_step_trace(self.fitted)
        return model if self.noise is False else NoisyModel(model, seed)


@Parameter(name="*", group="Fleet")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Engines, their router and the SLO."""

    engines: Annotated[int, option("Engines behind the router.", gte=1, lte=MAX_ENGINES)] = 1
    router: Literal["round-robin", "random", "least-loaded", "cache-aware", "session-sticky"] = (
        "round-robin"
    )
    router_view_ms: Annotated[
        float, option("Time between the router's looks at loads; 0: it always knows them.", gte=0)
    ] = 0.0
    slo_ttft_ms: Annotated[float | None, option("Limit of the TTFT.", gt=0)] = None
    slo_tpot_ms: Annotated[float | None, option("Limit of the TPOT.", gt=0)] = None
    max_duration: Annotated[
        float | None, Parameter(help="Break off after seconds of virtual time.")
    ] = None

    def view_s(self) -> float:
        if self.router not in READS_LOADS:
            reason = f"--router {self.router} reads no loads"
            refuse_without_effect(self, ("router_view_ms",), reason)
        return self.router_view_ms / 1000

    def slo(self) -> SLO:
        ttft_ms, tpot_ms = self.slo_ttft_ms, self.slo_tpot_ms
        return SLO(
            ttft_s=None if ttft_ms is None else ttft_ms / 1000,
            tpot_s=None if tpot_ms is None else tpot_ms / 1000,
        )
