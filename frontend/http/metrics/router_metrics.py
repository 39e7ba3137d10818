"""What this server's router knows of the engines of a model, and where it sent requests."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from frontend.fleet.engine_group import EngineGroup

_LABELS = ("model_name", "address")


def router_metrics(groups: Iterable[tuple[EngineGroup | None, str]]) -> Iterator[Metric]:
    """Metrics of models with several engines, with their names."""
    blocks = GaugeMetricFamily(
        "engine_core_router_prefix_blocks",
        "KV blocks that this server's router takes to be cached at the engine.",
        labels=_LABELS,
    )
    load = GaugeMetricFamily(
        "engine_core_router_load_tokens",
        "What unfinished requests have the engine do: of this server, and of other clients.",
        labels=(*_LABELS, "clients"),
    )
    snapshots = CounterMetricFamily(
        "engine_core_router_cache_snapshots",
        "Times that the engine told all that its prefix cache holds.",
        labels=_LABELS,
    )
    gaps = CounterMetricFamily(
        "engine_core_router_lost_cache_events",
        "Times that events of the engine's prefix cache were lost.",
        labels=_LABELS,
    )
    requests = CounterMetricFamily(
        "engine_core_router_requests",
        "Requests that were sent to the engine, also those that moved there.",
        labels=_LABELS,
    )
    tokens = CounterMetricFamily(
        "engine_core_router_prompt_tokens",
        "Prompt tokens by whether they were thought to be cached where they were sent.",
        labels=("model_name", "expected"),
    )
    for group, name in groups:
        if group is None:
            continue
        view = group.view
        for number, address in enumerate(group.addresses):
            if address not in group.staying:
                continue
            labels = [name, address]
            blocks.add_metric(labels, view.index.num_blocks[number])
            load.add_metric([*labels, "own"], group.loads[number])
            load.add_metric([*labels, "others"], view.others_loads[number])
            snapshots.add_metric(labels, view.num_snapshots[number])
            gaps.add_metric(labels, view.num_gaps[number])
            requests.add_metric(labels, group.num_sent[number])
        tokens.add_metric([name, "cached"], group.num_matched_tokens)
        tokens.add_metric([name, "new"], group.num_new_tokens)
    yield from (blocks, load, snapshots, gaps, requests, tokens)
