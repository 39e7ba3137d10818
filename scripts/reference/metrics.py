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
What `/metrics` has. The last column: the name with `--metrics-names vllm`, where it is another. How
to read them: [metrics](metrics.md).
"""
_TABLE = "\n| metric | kind | labels | what | `vllm:` |\n|---|---|---|---|---|\n"


def metrics_page() -> str:
    """Servers of no model have all names, and no numbers."""
    own, of_vllm = _families("engine-core"), _families("vllm")
    extra = {f"vllm:{each.name}" for each in VLLM_ONLY}
    pairs = list(zip(own, [each for each in of_vllm if each.name not in extra], strict=True))
    # labels are no public attribute of a family
    rows = [_row(each, list(each._labelnames), other) for each, other in pairs]
    more = [_row(each, list(each._labelnames), each) for each in of_vllm if each.name in extra]
    histograms = [
        f"| `engine_core_{each.name}` | histogram | `model_name` | {each.text} | `{each.name}` |"
        for each in RequestHistograms()
    ]
    return "\n".join(
        [
            _HEAD,
            "## Of requests" + _TABLE + "\n".join(histograms),
            "\n## Of engines and routers" + _TABLE + "\n".join(rows),
            "\n## Under vLLM's names only" + _TABLE + "\n".join(more) + "\n",
        ]
    )


def _families(names: MetricsNames) -> list[Metric]:
    registry = asyncio.run(Metrics(ServedModels([]), names).scrape())
    return [each for each in registry.collect() if not each.name.startswith("process_")]


def _row(family: Metric, labels: list[str], other: Metric) -> str:
    suffix = "_total" if family.type == "counter" else ""
    same = "" if other.name == family.name else f"`{other.name.removeprefix('vllm:')}{suffix}`"
    if family is other:
        same = "only"
    shown = ", ".join(f"`{each}`" for each in labels)
    return (
        f"| `{family.name}{suffix}` | {family.type} | {shown} | {family.documentation} | {same} |"
    )
