"""The options of the command line, in groups, and the parts that they make. vLLM's names where
`vllm bench serve` has the option."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from cyclopts import Parameter

from frontend.cli.connected import or_the_only_one
from frontend.cli.options import DaemonOptions, option, refuse_without_effect
from frontend.load.clients import ClosedLoop, Daemon, OpenLoop, Target
from frontend.load.http_streams import ENDPOINTS, Server
from frontend.load.records import SLOS
from frontend.load.traces.trace import MAX_REQUESTS
from frontend.load.workload import Arrivals, DatasetOptions, Workload
from frontend.sampling_params import RequestOutputKind, SamplingParams
from protocol.addresses import default_address

SEVERAL = Parameter(consume_multiple=True, negative="", show_default=False)


@Parameter(name="*", group="Target")
@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The target that is measured."""

    backend: Annotated[
        Literal["engine", "engine-chat", "openai", "openai-chat", "ollama", "ollama-chat"] | None,
        Parameter(help="Default: engine; with --base-url openai."),
    ] = None
    address: Annotated[
        str | None, Parameter(help="A daemon's; default: the default one, or your only daemon.")
    ] = None
    keys: Annotated[Path | None, Parameter(help="Your key's file, for a daemon with keys.")] = None
    base_url: Annotated[str | None, Parameter(help="Of a server; its key: OPENAI_API_KEY.")] = None
    endpoint: Annotated[str | None, Parameter(help="Path; default: the API's own.")] = None
    model: Annotated[str | None, Parameter(help="Default: the first that a server names.")] = None
    header: Annotated[tuple[str, ...], SEVERAL, Parameter(help="KEY=VALUE, to a server.")] = ()
    insecure: Annotated[bool, Parameter(help="Do not check certificates.", negative="")] = False
    extra_body: Annotated[str | None, Parameter(help="JSON: more fields; null: less.")] = None
    temperature: Annotated[float, option("0 is greedy.", gte=0)] = 0.0
    ignore_eos: Annotated[bool, Parameter(help="Generate the full length.", negative="")] = False

    @property
    def api(self) -> str:
        return self.backend or ("openai" if self.base_url else "engine")

    @property
    def is_daemon(self) -> bool:
        return self.api.startswith("engine")

    def make(self) -> Target:
        """A server's model is not filled in yet. Raises ValueError: options that contradict each
        other."""
        if self.is_daemon:
            of_servers = ("base_url", "endpoint", "model", "header", "insecure", "extra_body")
            refuse_without_effect(self, of_servers, f"--backend is {self.api}")
            sampling = SamplingParams(
                temperature=self.temperature,
                ignore_eos=self.ignore_eos,
                output_kind=RequestOutputKind.DELTA,
            )
            daemon = or_the_only_one(DaemonOptions(address=self.address))
            return Daemon(daemon.address or default_address(), self.keys, sampling)
        refuse_without_effect(self, ("address", "keys"), f"--backend is {self.api}")
        if self.base_url is None:
            raise ValueError(f"--backend {self.api} needs a --base-url")
        body: dict[str, Any] = {"temperature": self.temperature}
        if self.ignore_eos:
            if self.api.startswith("ollama"):
                raise ValueError("Ollama's API has no --ignore-eos; leave it out")
            body["ignore_eos"] = True
        try:
            body |= msgspec.json.decode(self.extra_body or "{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ValueError(f"--extra-body is no JSON object: {error}") from None
        key = os.getenv("OPENAI_API_KEY")
        headers = [("Authorization", f"Bearer {key}")] if key else []
        server = Server.at(
            self.base_url,
            api=self.api,
            endpoint=self.endpoint or ENDPOINTS[self.api],
            headers=(*headers, *parse_pairs("header", self.header)),
            extra_body=body,
        )
        if self.insecure and server.tls is None:
            raise ValueError("--insecure does nothing, as the URL is not https://; leave it out")
        return replace(server, model=self.model or "", tls=server.tls and not self.insecure)


@Parameter(name="*", group="Load")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When it is sent."""

    request_rate: Annotated[
        tuple[float, ...],
        SEVERAL,
        Parameter(help="A second; several: a run each. Default: inf, all at once."),
    ] = (math.inf,)
    burstiness: Annotated[float, Parameter(help="1: Poisson; below: bursts; inf: constant.")] = 1.0
    max_concurrency: Annotated[
        tuple[int, ...], SEVERAL, Parameter(help="Most requests at once; several: a run each.")
    ] = ()
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    ramp_up_start_rps: Annotated[float | None, option("First rate.", gt=0)] = None
    ramp_up_end_rps: Annotated[float | None, option("Last rate.", gt=0)] = None
    rate_scale: Annotated[float, option("Factor of a trace's own rate.", gt=0)] = 1.0
    num_prompts: Annotated[int | None, option("Default: 1000, of a file all.", gte=1)] = None
    duration: Annotated[float | None, option("Seconds; what began is awaited.", gt=0)] = None
    num_warmups: Annotated[int, option("Requests sent before, one by one.", gte=0)] = 0
    request_timeout: Annotated[float, option("Seconds, then it has failed.", gt=0)] = 21600.0
    processes: Annotated[int, option("Client processes.", gte=1)] = 1

    def check(self, dataset: DatasetOptions) -> None:
        """Raises ValueError: options that contradict each other."""
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(part is None for part in ramp) != all(part is None for part in ramp):
            raise ValueError("a ramp needs --ramp-up-strategy, -start-rps and -end-rps")
        if any(not rate > 0 for rate in self.request_rate) or not self.request_rate:
            raise ValueError(f"--request-rate is {self.request_rate}, it must be above 0")
        if any(limit < 1 for limit in self.max_concurrency):
            raise ValueError(f"--max-concurrency is {self.max_concurrency}, it must be at least 1")
        is_ramp, is_endless = ramp[0] is not None, all(math.isinf(one) for one in self.request_rate)
        if is_ramp and not is_endless:
            raise ValueError("--request-rate and a ramp contradict each other; leave one out")
        if is_ramp and self.num_prompts is None and dataset.dataset_name != "random":
            raise ValueError("a ramp over a file needs --num-prompts")
        if len(self.request_rate) > 1 and len(self.max_concurrency) > 1:
            raise ValueError("a sweep is over --request-rate or --max-concurrency, not over both")
        if is_endless and not is_ramp:
            refuse_without_effect(self, ("burstiness",), "there is no --request-rate")
            if self.duration and not self.max_concurrency and not dataset.is_trace_file:
                raise ValueError("--duration needs a --request-rate or a --max-concurrency")
        if not (dataset.is_trace_file and is_endless and not is_ramp):
            refuse_without_effect(self, ("rate_scale",), "there is no trace with times of its own")

    def loops(
        self, dataset: DatasetOptions, **parts: Any
    ) -> Iterator[tuple[str, OpenLoop | ClosedLoop]]:
        """Each run of a sweep, and its name. Prompts of later runs are others: those of an earlier
        one may be cached."""
        ramp = None
        if self.ramp_up_strategy and self.ramp_up_start_rps and self.ramp_up_end_rps:
            ramp = self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps
        num_requests = self.num_prompts
        if num_requests is None and self.duration is not None:
            num_requests = MAX_REQUESTS
        elif num_requests is None and dataset.dataset_name == "random":
            num_requests = 1000
        limits: Sequence[int | None] = self.max_concurrency or (None,)
        runs = [(rate, limit) for rate in self.request_rate for limit in limits]
        for number, (rate, limit) in enumerate(runs):
            is_closed = (
                math.isinf(rate) and limit is not None and not ramp and not dataset.is_trace_file
            )
            arrivals = Arrivals(
                rate=rate,
                burstiness=self.burstiness,
                ramp=ramp,
                rate_scale=self.rate_scale,
                duration_s=None if is_closed else self.duration,
            )
            workload = Workload(
                options=replace(dataset, seed=dataset.seed + number),
                num_requests=num_requests,
                arrivals=arrivals,
                **parts,
            )
            names = [f"{ramp[0]} {ramp[1]:g} to {ramp[2]:g} req/s"] if ramp else []
            names += [f"{rate:g} req/s"] if math.isfinite(rate) else []
            names += [f"{limit} at once"] if limit else []
            name = ", ".join(names) or (
                "the trace's times" if dataset.is_trace_file else "all at once"
            )
            if is_closed and limit is not None:
                yield name, ClosedLoop(workload, limit, self.duration)
            else:
                yield name, OpenLoop(workload, limit)


@Parameter(name="*", group="Report")
@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is told. A table goes to stderr, JSON to a stdout that is no terminal."""

    goodput: Annotated[tuple[str, ...], SEVERAL, Parameter(help="SLOs, ms: ttft:500 tpot:50.")] = ()
    metric_percentiles: Annotated[str, Parameter(help="As 50,90,99.9.")] = "50,90,95,99"
    metadata: Annotated[tuple[str, ...], SEVERAL, Parameter(help="KEY=VALUE, kept.")] = ()
    label: Annotated[str | None, Parameter(help="Name of the result; default: its load.")] = None
    out: Annotated[Path | None, Parameter(help="OUT.json and OUT.html, as by the next ones.")] = (
        None
    )
    json: Annotated[Path | None, Parameter(help="The result with every request.")] = None
    csv: Annotated[Path | None, Parameter(help="A row a request.")] = None
    html: Annotated[Path | None, Parameter(help="A page with pictures.")] = None

    def with_out(self) -> Self:
        """The same, with the files that --out stands for."""
        if self.out is None:
            return self
        name = self.out.with_suffix("") if self.out.suffix in (".json", ".html") else self.out
        json, html = (Path(f"{name}.{kind}") for kind in ("json", "html"))
        return replace(self, json=self.json or json, html=self.html or html)

    def percentiles(self) -> list[float]:
        """Raises ValueError: no numbers from 0 to 100, or a folder that is not there."""
        for path in (self.json, self.csv, self.html):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
        try:
            found = [float(text) for text in self.metric_percentiles.split(",")]
        except ValueError:
            found = [-1.0]
        if not all(0 <= one <= 100 for one in found):
            raise ValueError(
                f"--metric-percentiles is {self.metric_percentiles!r}, write it as 50,90,99.9"
            )
        return sorted({50.0, 99.0, *found})


def parse_pairs(name: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Raises ValueError: not KEY=VALUE, or with the end of a line."""
    pairs = [one.partition("=") for one in texts]
    for text, (key, equals, _) in zip(texts, pairs, strict=True):
        if not (key.strip() and equals) or set("\r\n") & set(text):
            raise ValueError(f"--{name} {text!r} is not KEY=VALUE")
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Seconds by the names of SLOS. Raises ValueError: not KEY:VALUE, an unknown key or no time."""
    found = {}
    for one in texts:
        name, _, value = one.partition(":")
        try:
            limit_s = float(value) / 1000
        except ValueError:
            limit_s = 0.0
        if name not in SLOS or not 0 < limit_s < math.inf:
            raise ValueError(
                f"--goodput {one!r} is not KEY:MILLISECONDS with a key of {', '.join(SLOS)}"
            )
        found[name] = limit_s
    return found
