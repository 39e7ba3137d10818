"""A real Prometheus scrapes the server: dashboard, alert rules and example configuration."""

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from http_server import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.packages,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="needs prometheus and promtool: apt-get install prometheus",
    ),
]

MONITORING = Path(__file__).resolve().parents[3] / "docs" / "monitoring"
BODY = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}


def promtool(*arguments, text=None):
    result = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def expressions():
    """Of the dashboard, with Grafana's variables filled in."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    found = [
        target["expr"].replace("$__rate_interval", "10s").replace("$model", ".*")
        for panel in panels
        for target in panel.get("targets", ())
    ]
    assert len(found) > 20
    return found


@pytest.fixture
def prometheus(tmp_path):
    """Starts one that scrapes these URLs each 200 ms; returns a query function."""
    processes = []

    def start(*urls):
        text = (MONITORING / "prometheus.yml").read_text()
        targets = ", ".join(f'"{url.removeprefix("http://")}"' for url in urls)
        text = text.replace('"127.0.0.1:8000"', targets).replace("5s", "200ms")
        text = text.replace("alerts.yml", str(MONITORING / "alerts.yml"))
        (tmp_path / "prometheus.yml").write_text(text)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with (tmp_path / "log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [
                        "prometheus",
                        f"--config.file={tmp_path}/prometheus.yml",
                        f"--storage.tsdb.path={tmp_path}/data",
                        f"--web.listen-address=127.0.0.1:{port}",
                    ],
                    stdout=log,
                    stderr=log,
                )
            )

        def query(expression):
            url = f"http://127.0.0.1:{port}/api/v1/query"
            response = httpx.get(url, params={"query": expression})
            if response.status_code == 503:
                response.raise_for_status()
            answer = response.json()
            assert answer["status"] == "success", (expression, answer)
            return answer["data"]["result"]

        return query

    yield start
    for process in processes:
        process.terminate()
        process.wait(20)


def wait_for(query, expression):
    deadline_s = time.monotonic() + 60
    while True:
        try:
            if result := query(expression):
                return result
        except (httpx.TransportError, httpx.HTTPStatusError):  # it starts
            pass
        assert time.monotonic() < deadline_s, f"no result of {expression}"
        time.sleep(0.2)


def test_alert_rules_fire_when_they_should_and_only_then():
    promtool("check", "rules", MONITORING / "alerts.yml")
    promtool("check", "config", MONITORING / "prometheus.yml")
    promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))


@pytest.mark.parametrize("names", ["engine-core", "vllm"])
def test_promtool_reads_the_metrics(engine, names):
    with serving(engine.address, metrics_names=names) as url:
        httpx.post(url + "/v1/completions", json=BODY).raise_for_status()
        text = httpx.get(url + "/metrics").text
    if names == "vllm":  # its names are not what promtool advises, such as colons
        result = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert "error while linting" not in result.stderr
    else:
        promtool("check", "metrics", text=text)


def test_prometheus_scrapes_two_servers_of_one_engine_and_the_dashboard_has_data(
    engine, prometheus
):
    with serving(engine.address) as one, serving(engine.address) as other:
        query = prometheus(one, other)
        wait_for(query, 'count(up{job="engine-core"} == 1) == 2')
        for _ in range(3):
            httpx.post(one + "/v1/completions", json=BODY).raise_for_status()
            httpx.post(other + "/v1/completions", json=BODY).raise_for_status()
        wait_for(query, "sum(engine_core_e2e_request_latency_seconds_count) == 6")
        # a series of each server, of the same engine; on a busy machine one may miss a scrape
        (uptime,) = wait_for(query, "count by (engine) (engine_core_uptime_seconds) == 2")
        assert uptime["metric"]["engine"] == engine.engine_id
        # rates need two scrapes
        wait_for(query, "rate(engine_core_time_to_first_token_seconds_count[10s]) > 0")
        for each in expressions():
            wait_for(query, each)
        assert query('ALERTS{alertstate="firing"}') == []
