"""The reference names every command, option, route and metric; no link of the site is dead."""

import dataclasses
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import frontend
from engine_core.options.engine import EngineOptions
from frontend.http.app import OPERATIONS
from frontend.http.metrics.engine_metrics import ENGINE_METRICS
from scripts.reference.command_lines import engine_client_page, engine_core_page
from scripts.reference.http_api import http_page
from scripts.reference.metrics import metrics_page
from scripts.reference.python_api import errors_page, python_page

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_daemon_has_every_option_even_those_that_help_hides():
    page = engine_core_page()
    own = [each.name for each in dataclasses.fields(EngineOptions) if each.type is not dict]
    grouped = {"pooling", "adapters", "multimodal", "scheduling", "speculation", "security"}
    for name in {*own} - grouped - {"disaggregation", "parallel"}:
        assert f'<a id="engine-core--{name.replace("_", "-")}"></a>' in page
    for name in ("num-decode-steps", "tensor-parallel-size", "draft-model", "max-loras"):
        assert f'<a id="engine-core--{name}"></a>' in page
    assert "\n## engine-core pull\n" in page
    assert '<a id="engine-core-plan--slo-ttft-ms"></a>' in page
    assert '<a id="engine-core-simulate-run--trace"></a>' in page


def test_the_page_of_the_client_has_its_commands_and_no_path_of_this_machine():
    page = engine_client_page()
    for command in ("chat", "complete", "http", "serve", "wake-up", "top", "bench", "compare"):
        assert f"\n## engine-client {command}\n" in page
    assert '<a id="engine-client-serve--api-key-file"></a>' in page
    assert "/run/user" not in page and "engine.sock" not in page


def test_the_page_of_http_has_every_route_and_links_every_body():
    page = http_page()
    for operation in OPERATIONS:
        heading = f"\n### {operation.method} {operation.path.replace(':path}', '}')}\n"
        assert page.count(heading) == 1, heading
    assert "\n### ChatCompletionRequest { #ChatCompletionRequest }\n" in page
    assert "| `temperature` | number (at least 0, at most 100) | none |" in page


def test_the_page_of_metrics_has_every_metric_with_the_name_that_vllm_gives_it():
    page = metrics_page()
    for metric in ENGINE_METRICS:
        assert f"| `engine_core_{metric.name}" in page
        assert (f"<br>`vllm:{metric.name}" in page) == metric.in_vllm
    assert page.count("\n\n| metric | kind | what |\n|---|---|---|\n| `") == 3  # or it is no table
    assert "| `engine_core_up` | gauge by `address` |" in page
    name = "| `engine_core_step_tokens`<br>`vllm:iteration_tokens_total` | histogram |"
    assert name in page


def test_the_pages_of_python_name_all_that_is_public():
    pages = python_page() + errors_page()
    missing = [name for name in frontend.__all__ if f"::: frontend.{name}\n" not in pages]
    assert all(issubclass(getattr(frontend, name), Exception) for name in missing)
    assert all(name in pages for name in missing)


@pytest.mark.extended
@pytest.mark.skipif(find_spec("zensical") is None, reason="needs the extra `docs`")
def test_the_site_builds_without_a_dead_link():
    script = ROOT / "scripts" / "docs_site.py"
    subprocess.run([sys.executable, script], check=True, capture_output=True, timeout=600)
    assert (ROOT / "build/docs/site/reference/python.html").stat().st_size > 100_000
