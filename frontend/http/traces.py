"""A trace of each request for an OpenTelemetry collector, made when the request is over: nothing is
done a token, and a queue and a thread of the SDK keep the collector away from requests."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from frontend.errors import InvalidInput
from frontend.http.exchange import Exchange, current_exchange
from frontend.request_state import RequestState

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

_EXPORT_TIMEOUT_S = 5.0
_COMPLETIONS = ("/v1/completions", "/api/generate")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def check_endpoint(endpoint: str) -> None:
    """
    Raises:
        InvalidInput: it is no URL, the environment asks for another protocol, or OpenTelemetry is
            not installed.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise InvalidInput(
            f"--otlp-traces-endpoint is {endpoint!r}, it must be a URL of OTLP over HTTP, such as "
            "http://localhost:4318/v1/traces"
        )
    protocol = next(filter(None, map(os.environ.get, _PROTOCOL_VARIABLES)), "http/protobuf")
    if protocol != "http/protobuf":
        raise InvalidInput(
            f"the environment asks for OTLP by {protocol}, and traces are sent by http/protobuf; "
            f"unset {' and '.join(_PROTOCOL_VARIABLES)}, and give the collector's HTTP port"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install it with "
            "`pip install 'engine-core[otel]'`"
        ) from None


class Traces:
    """Of the requests of one server.

    Args:
        endpoint: one that `check_endpoint` has passed.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        release = version("engine-core")
        service = os.environ.get("OTEL_SERVICE_NAME", "engine-core")
        resource = Resource.create({SERVICE_NAME: service, SERVICE_VERSION: release})
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each attempt
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(_Reporting(exporter, endpoint)))
        self._tracer = self._provider.get_tracer("frontend.http", release)

    def begin(self, request: RequestState) -> Callable[[], None]:
        """To be called in the request's context. What it returns ends the trace."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exchange = current_exchange.get() or Exchange()
        names = ("traceparent", "tracestate")
        headers = {name: exchange.headers[name] for name in names if name in exchange.headers}
        parent = TraceContextTextMapPropagator().extract(headers)
        return lambda: self._send(request, exchange, parent)

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_EXPORT_TIMEOUT_S)

    def _send(self, request: RequestState, exchange: Exchange, parent: Context) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        start_s = request.metrics.arrival_time
        end_s = time.time()
        operation = "text_completion" if exchange.path in _COMPLETIONS else "chat"
        span = self._tracer.start_span(
            f"{operation} {exchange.model}",
            parent,
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **_attributes(request, exchange, end_s - start_s)},
            start_time=_ns(start_s),
        )
        failure = _failure(request)
        if failure is not None:
            span.set_attribute("error.type", failure)
            span.set_status(StatusCode.ERROR, None if request.error is None else str(request.error))
        inside = set_span_in_context(span)
        for name, begin_s, stop_s in _phases(request, end_s - start_s):
            begin_ns, stop_ns = _ns(start_s + begin_s), _ns(start_s + stop_s)
            self._tracer.start_span(name, inside, start_time=begin_ns).end(stop_ns)
        span.end(_ns(end_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _failure(request: RequestState) -> str | None:
    """The failure in one word, as `error.type` has it."""
    if request.error is not None:
        return type(request.error).__name__
    if not request.finished:
        return "cancelled"
    reasons = {each.finish_reason for each in request.sequences}
    return next((each for each in ("error", "timeout") if each in reasons), None)


def _attributes(request: RequestState, exchange: Exchange, e2e_s: float) -> dict[str, Any]:
    """The conventions for generative AI, and vLLM's names beside them. Never text."""
    asked, params, metrics = request.wire, request.wire.sampling_params, request.metrics
    num_prompt_tokens = len(asked.prompt_token_ids)
    num_output_tokens = sum(len(each.token_ids) for each in request.sequences)
    engine = metrics.engine
    found: dict[str, Any] = {
        "gen_ai.provider.name": "engine-core",
        "gen_ai.request.model": exchange.model,
        "gen_ai.response.model": exchange.model,
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.id": metrics.engine_request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.choice.count": asked.num_sequences,
        "gen_ai.request.n": asked.num_sequences,
        "gen_ai.response.finish_reasons": [
            each.finish_reason or "abort" for each in request.sequences
        ],
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_output_tokens,
        "gen_ai.usage.num_sequences": asked.num_sequences,
        "gen_ai.latency.e2e": e2e_s,
        "gen_ai.latency.time_to_first_token": metrics.first_token_s,
    }
    if engine is not None and engine.first_scheduled_s is not None:
        found["gen_ai.latency.time_in_queue"] = engine.first_scheduled_s
        inference_s = engine.finished_s - engine.first_scheduled_s
        found["gen_ai.latency.time_in_model_inference"] = inference_s
        if engine.first_token_s is not None:
            prefill_s = engine.first_token_s - engine.first_scheduled_s
            found["gen_ai.latency.time_in_model_prefill"] = prefill_s
            found["gen_ai.latency.time_in_model_decode"] = engine.finished_s - engine.first_token_s
    return {name: value for name, value in found.items() if value is not None}


def _phases(request: RequestState, end_s: float) -> list[tuple[str, float, float]]:
    """What came after what: names, begins and ends in seconds since the request was submitted. Of a
    request that the engine did not end, or that was resumed, only what was seen here."""
    metrics, engine = request.metrics, request.metrics.engine
    last_s = metrics.last_token_s
    if engine is not None and not metrics.num_resumptions:
        begin_s = 0.0
        decoded_s = None if last_s is None else max(last_s, engine.finished_s)
        times = [engine.first_scheduled_s, engine.first_token_s, decoded_s]
    elif metrics.first_token_s is not None:
        begin_s = metrics.first_token_s
        times = [None, None, last_s]
    else:
        return []
    phases = []
    names = ("queued", "prefill", "decode", "detokenise")
    for name, time_s in zip(names, (*times, end_s), strict=True):
        if time_s is not None:
            stop_s = min(max(time_s, begin_s), end_s)
            phases.append((name, begin_s, stop_s))
            begin_s = stop_s
    return phases


class _Reporting:
    """An exporter of spans that says once when the collector is away, and once when it is back."""

    def __init__(self, exporter: SpanExporter, where: str) -> None:
        self._exporter = exporter
        self._where = where
        self._is_away = False
        self.shutdown = exporter.shutdown

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        reason = "it does not answer, or refuses them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            result, reason = SpanExportResult.FAILURE, repr(error)
        is_away = result is not SpanExportResult.SUCCESS
        if is_away and not self._is_away:
            logger.warning("traces for %s are lost until it takes them: %s", self._where, reason)
        elif self._is_away and not is_away:
            logger.warning("traces are taken again by %s", self._where)
        self._is_away = is_away
        return result
