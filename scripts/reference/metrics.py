"""Every metric of a server, by both sets of names, from the collectors themselves."""

import asyncio

from prometheus_client.core import Metric

from frontend.http.metrics.engine_metrics import VLLM_ONLY
from frontend.http.metrics.exposition import Metrics
from frontend.http.request_histograms import RequestHistograms
from frontend.http.served_models import ServedModels
from frontend.http.settings import MetricsNames

_HEAD = """\
# Names of metrics
What `/metrics` has; below a name stands that with `--metrics-names vllm`, where it has another one.
How to read them: [metrics](metrics.md).
"""
_TABLE = "\n\n| metric | kind | what |\n|---|---|---|\n"
_OF_ALL = ("model_name", "engine", "served_model_name")


def metrics_page() -> str:
    """Servers of no model have all names, and no numbers."""
    own, of_vllm = _families("engine-core"), _families("vllm")
    extra = {f"vllm:{each.name}" for each in VLLM_ONLY}
    pairs = zip(own, [each for each in of_vllm if each.name not in extra], strict=True)
    histograms = [
        f"| `engine_core_{each.name}`<br>`vllm:{each.name}` | histogram | {each.text} |"
        for each in RequestHistograms()
    ]
    return "\n".join(
        [
            _HEAD,
            "## Of requests\nEach has the label `model_name`." + _TABLE + "\n".join(histograms),
            "\n## Of engines and routers",
            "Those of engines have the labels " + ", ".join(f"`{each}`" for each in _OF_ALL),
            "(with vLLM's names the first two), beside those of the table.",
            _TABLE + "\n".join(_row(each, other) for each, other in pairs),
            "\n## Under vLLM's names only",
            _TABLE + "\n".join(_row(each, each) for each in of_vllm if each.name in extra) + "\n",
        ]
    )


def _families(names: MetricsNames) -> list[Metric]:
    registry = asyncio.run(Metrics(ServedModels([]), names).scrape())
    return [each for each in registry.collect() if not each.name.startswith("process_")]


def _row(family: Metric, other: Metric) -> str:
    suffix = "_total" if family.type == "counter" else ""
    names = dict.fromkeys(f"`{each.name}{suffix}`" for each in (family, other))
    # labels are no public attribute of a family
    labels = [f"`{each}`" for each in family._labelnames if each not in _OF_ALL]
    kind = family.type + (f" by {', '.join(labels)}" if labels else "")
    return f"| {'<br>'.join(names)} | {kind} | {family.documentation} |"
