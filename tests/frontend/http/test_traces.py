"""Traces of requests, as a collector of our own reads them with OpenTelemetry's messages."""

import contextlib
import itertools
import logging
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from fake_engine import wait_until
from http_server import serving

from frontend.errors import InvalidInput
from frontend.http.settings import ServerSettings
from frontend.http.traces import check_endpoint

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
COMPLETION = {"prompt": "a"}
HELLO = {"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 8}
NS = 1_000_000_000


class Collector:
    """Takes what is sent to `endpoint`."""

    def __init__(self, port=0):
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

        collector = self
        self.batches = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.batches.append(messages.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def spans(self):
        scopes = [scope for b in self.batches for r in b.resource_spans for scope in r.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector():
    with contextlib.closing(Collector()) as collector:
        yield collector


@contextlib.contextmanager
def traced_server(engine, endpoint):
    with (
        serving(engine.address, "small", otlp_traces_endpoint=endpoint) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield http


def traced(engine, collector, path="/v1/completions", body=COMPLETION, **headers):
    """All spans of one request, by name, the whole request's under "request"."""
    with traced_server(engine, collector.endpoint) as http:
        assert http.post(path, json=body, headers=headers).status_code == 200
    return by_name(collector)


def by_name(collector):
    spans = collector.spans()
    ids = {span.span_id for span in spans}
    return {span.name if span.parent_span_id in ids else "request": span for span in spans}


def attributes(span):
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def test_a_request_is_a_span_with_its_phases_behind_each_other(engine, collector):
    spans = traced(engine, collector, "/v1/chat/completions", HELLO)
    request = spans.pop("request")
    assert request.name == "chat small"
    assert list(spans) == ["queued", "prefill", "decode", "detokenise"]
    phases = list(spans.values())
    assert {each.parent_span_id for each in phases} == {request.span_id}
    assert phases[0].start_time_unix_nano == request.start_time_unix_nano
    for before, after in itertools.pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert phases[-1].end_time_unix_nano == request.end_time_unix_nano
    assert request.status.code == 0


def test_a_span_says_what_was_asked_and_used_by_the_conventions_and_by_vllm(engine, collector):
    body = HELLO | {"temperature": 0.5, "top_k": 7, "n": 2}
    num_tokens = len("user:secret words;")
    spans = traced(engine, collector, "/v1/chat/completions", body, **{"x-request-id": "ab"})
    span = spans["request"]
    found = attributes(span)
    reasons = found.pop("gen_ai.response.finish_reasons")
    assert [each.string_value for each in reasons.values] == ["length", "length"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "small",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": num_tokens,
        "gen_ai.usage.prompt_tokens": num_tokens,
        "gen_ai.usage.output_tokens": 16,
        "gen_ai.usage.completion_tokens": 16,
    }
    assert expected.items() <= found.items()
    assert found["gen_ai.request.id"].startswith("ab-")
    assert found["gen_ai.response.id"] == engine.requests[0].request_id
    e2e_s = (span.end_time_unix_nano - span.start_time_unix_nano) / NS
    assert found["gen_ai.latency.e2e"] == pytest.approx(e2e_s, abs=1e-3)
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= e2e_s
    assert not [value for value in found.values() if "secret" in str(value)]


def test_the_parent_is_the_one_of_the_header(engine, collector):
    spans = traced(engine, collector, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert spans["request"].parent_span_id.hex() == PARENT_ID
    assert spans["request"].name == "text_completion small"


@pytest.mark.parametrize(
    ("header", "count"), [("00-" + TRACE_ID + "-" + PARENT_ID + "-00", 0), ("not one", 5)]
)
def test_an_unsampled_parent_is_obeyed_and_a_broken_header_is_no_parent(
    engine, collector, header, count
):
    assert len(traced(engine, collector, traceparent=header)) == count


def test_a_stream_that_its_reader_left_is_a_span_with_an_error(engine, collector):
    body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
    engine.step_s = 0.02
    with traced_server(engine, collector.endpoint) as http:
        with http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_bytes())
        wait_until(lambda: bool(engine.aborted))
    spans = by_name(collector)
    assert attributes(spans["request"])["error.type"] == "cancelled"
    assert spans["request"].status.code == 2
    assert set(spans) == {"request", "decode", "detokenise"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_collector_that_is_away_is_one_line_and_no_request_waits(engine, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr("frontend.http.traces._EXPORT_TIMEOUT_S", 0.5)
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/v1/traces"
    caplog.set_level(logging.WARNING)
    with (
        contextlib.ExitStack() as later,
        traced_server(engine, endpoint) as http,
    ):
        for _ in range(3):
            assert http.post("/v1/completions", json=COMPLETION).status_code == 200
            wait_until(lambda: bool(caplog.records))
        collector = later.enter_context(contextlib.closing(Collector(port)))

        def taken():
            http.post("/v1/completions", json=COMPLETION)
            return bool(collector.batches)

        wait_until(taken)
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 2
    assert "lost" in lines[0] and endpoint in lines[0]
    assert "again" in lines[1]


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://localhost", "http://"])
def test_what_is_no_url_is_refused(endpoint):
    with pytest.raises(InvalidInput, match="--otlp-traces-endpoint"):
        ServerSettings(otlp_traces_endpoint=endpoint).check()


def test_another_protocol_of_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(InvalidInput, match="OTLP by grpc"):
        check_endpoint("http://localhost:4317")


def test_without_opentelemetry_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    for name in [each for each in sys.modules if each.startswith("opentelemetry.exporter.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InvalidInput, match=r"pip install 'engine-core\[otel\]'"):
        check_endpoint("http://localhost:4318/v1/traces")
