"""GET /metrics: Prometheus text."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from frontend.engine.session import EngineSession
from frontend.engine_calls import Engine
from frontend.errors import EngineClientError
from frontend.http.metrics.engine_metrics import ENGINE_METRICS, VLLM_ONLY, EngineMetric
from frontend.http.metrics.router_metrics import router_metrics
from frontend.http.operations import operation
from frontend.http.request_histograms import add_histogram
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.settings import MetricsNames
from protocol.calls import STEP_TOKENS_BOUNDS, EngineStatistics
from protocol.outputs import ModelInfo

_ANSWER_S = 2.0
"""An engine answers between two steps; the scrape does not wait longer."""
_PREFIX, _VLLM = "engine_core_", "vllm:"
_LABELS = ("model_name", "engine", "served_model_name")
_VLLM_LABELS = ("model_name", "engine")


@operation("GET", "/metrics")
async def get_metrics(request: Request) -> Response:
    """Metrics of this server and its engines, in Prometheus' text format."""
    metrics: Metrics = request.app.state.metrics
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(await metrics.scrape()), headers={"content-type": content_type})


@dataclass(frozen=True, slots=True)
class _EngineAnswer:
    engine_id: str
    model: ModelInfo
    now: EngineStatistics


class Metrics:
    """Asks engines when it is scraped, each by one call at a time: scrapes that come while one is
    under way share its answer."""

    def __init__(self, models: ServedModels, names: MetricsNames) -> None:
        self._models = models
        self._names: MetricsNames = names
        self._asking: WeakKeyDictionary[EngineSession, asyncio.Task[_EngineAnswer | None]] = (
            WeakKeyDictionary()
        )

    async def scrape(self) -> CollectorRegistry:
        found = await asyncio.gather(*map(self._engines, self._models))
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        registry.register(_Scrape([each for engines in found for each in engines], self._names))
        return registry

    async def _engines(self, model: ServedModel) -> list["_Engine"]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                engines = await model.engines()
        except (TimeoutError, EngineClientError):
            return [(model, "", None)]
        if not engines:
            return [(model, "", None)]
        answers = await asyncio.gather(*map(self._answer, engines))
        addresses = [each.address if len(engines) > 1 else "" for each in engines]
        return [(model, *each) for each in zip(addresses, answers, strict=True)]

    async def _answer(self, engine: Engine) -> _EngineAnswer | None:
        """None: the engine is away or stuck."""
        asking = self._asking.get(engine.session)
        if asking is None or asking.done():
            asking = self._asking[engine.session] = asyncio.ensure_future(_ask(engine))
        done, _ = await asyncio.wait([asking], timeout=_ANSWER_S)
        return asking.result() if done else None


async def _ask(engine: Engine) -> _EngineAnswer | None:
    try:
        await engine.session.ready(waits=False)
        now = await engine.statistics()
    except EngineClientError:
        return None
    welcome = engine.session.welcome
    assert welcome is not None
    return _EngineAnswer(welcome.engine_id, welcome.model, now)


_Engine = tuple[ServedModel, str, _EngineAnswer | None]
"""Its address, if it is one of several of its model, and its answer, if there is one."""


class _Scrape(Collector):
    """All metrics at one moment."""

    def __init__(self, engines: list[_Engine], names: MetricsNames) -> None:
        self._engines = engines
        self._is_vllm = names == "vllm"
        self._labels = _VLLM_LABELS if self._is_vllm else _LABELS

    def collect(self) -> Iterator[Metric]:
        yield from self._engines_up()
        for metric in (*ENGINE_METRICS, *(VLLM_ONLY if self._is_vllm else ())):
            yield self._engine_metric(metric)
        yield self._step_tokens()
        named = self._by_model().items()
        yield from router_metrics((each[0].group, _served_name(*each)) for each in named)
        yield from self._request_histograms()

    def _answers(self) -> Iterator[tuple[tuple[str, ...], _EngineAnswer]]:
        """The engines' answers, with the values of `_labels`."""
        for model, _, answer in self._engines:
            if answer is not None:
                served, engine_id = _served_name(model, answer), answer.engine_id
                own = (answer.model.name, engine_id, served)
                yield (served, engine_id) if self._is_vllm else own, answer

    def _by_model(self) -> dict[ServedModel, _EngineAnswer | None]:
        return {model: answer for model, _, answer in self._engines}

    def _engines_up(self) -> Iterator[Metric]:
        text = f"1: the engine answered within {_ANSWER_S:g} s."
        up = GaugeMetricFamily(f"{_PREFIX}up", text, labels=["model_name", "address"])
        for model, address, answer in self._engines:
            if model.resting is None:
                up.add_metric([_served_name(model, answer), address], answer is not None)
        yield up

    def _engine_metric(self, metric: EngineMetric) -> Metric:
        prefix = _VLLM if self._is_vllm and metric.in_vllm else _PREFIX
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        labels = [*self._labels, *metric.labels]
        family = kind(prefix + metric.name, metric.text, labels=labels)
        for engine, answer in self._answers():
            for values, number in metric.samples(answer.now):
                family.add_metric([*engine, *values], number)
        return family

    def _step_tokens(self) -> Metric:
        name = f"{_VLLM}iteration_tokens_total" if self._is_vllm else f"{_PREFIX}step_tokens"
        family = HistogramMetricFamily(name, "Histogram of tokens of steps.", labels=self._labels)
        for engine, answer in self._answers():
            now = answer.now
            counts = now.num_steps_by_tokens
            num_tokens = now.num_prefill_tokens + now.num_decode_tokens
            if counts:
                add_histogram(family, engine, STEP_TOKENS_BOUNDS, counts, num_tokens)
        return family

    def _request_histograms(self) -> Iterator[Metric]:
        prefix = _VLLM if self._is_vllm else _PREFIX
        families: dict[str, HistogramMetricFamily] = {}
        for model, answer in self._by_model().items():
            for histogram in model.histograms:
                name = prefix + histogram.name
                family = families.get(name) or HistogramMetricFamily(
                    name, histogram.text, labels=["model_name"]
                )
                families[name] = family
                histogram.add_to(family, [_served_name(model, answer)])
        yield from families.values()


def _served_name(model: ServedModel, answer: _EngineAnswer | None) -> str:
    """Of the server, as metrics of requests have it. Those of engines have the engine's own name of
    the model beside it; under vLLM's names this one alone, as vLLM's dashboards expect."""
    if model.names:
        return model.names[0]
    return "unknown" if answer is None else answer.model.name
