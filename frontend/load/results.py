"""A load test's result: its JSON document, the table for people, a CSV row a request, warnings."""

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from frontend.load.clients import ClientFacts, Outcome
from frontend.load.records import RequestRecord, summarise
from frontend.load.report import latency_lines

LATENCY_TITLES = {
    "ttft_s": "TTFT",
    "ttft_from_send_s": "TTFT from send",
    "tpot_s": "TPOT",
    "inter_token_s": "ITL",
    "end_to_end_s": "E2EL",
    "end_to_end_from_send_s": "E2EL from send",
    "client_lateness_s": "sent late by",
}
# vLLM's benchmark knows latencies from sending only
_VLLM_NAMES = {
    "ttft": "ttft_from_send_s",
    "tpot": "tpot_s",
    "itl": "inter_token_s",
    "e2el": "end_to_end_from_send_s",
}
_FIELDS = [field.name for field in dataclasses.fields(RequestRecord)]
_MOST_CPU = 0.8
_LEAST_LAG_S = 0.005
_MOST_LAG = 0.2


class Result(NamedTuple):
    name: str
    document: dict[str, Any]
    """The document without the requests."""
    records: list[RequestRecord]


def make_result(
    name: str,
    outcome: Outcome,
    *,
    percentiles: Sequence[float],
    slos_s: Mapping[str, float],
    is_limited: bool,
    facts: Mapping[str, Any],
) -> Result:
    """The document of a run: vLLM's names with vLLM's definitions at the top, seconds in `results`.
    `is_limited`: requests waited for others to end before they were sent."""
    summary = summarise(outcome.records, percentiles=percentiles, slos_s=slos_s)
    document = {
        "label": name,
        **facts,
        **vllm_results(summary),
        "results": summary,
        "clients": [client._asdict() for client in outcome.clients],
        "warnings": _warnings(summary, outcome.clients, is_limited),
    }
    return Result(name, document, outcome.records)


def vllm_results(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `vllm bench serve`, by its names: milliseconds, from the moment of sending."""
    rates, good = summary["throughput"], summary["goodput"]
    found: dict[str, Any] = {
        "duration": summary["duration_s"],
        "completed": summary["num_finished"],
        "failed": sum(summary["errors"].values()),
        "total_input_tokens": summary["num_prompt_tokens"],
        "total_output_tokens": summary["num_output_tokens"],
        "request_throughput": rates["requests_per_s"],
        "request_goodput": None if good is None else good["requests_per_s"],
        "output_throughput": rates["output_tokens_per_s"],
        "total_token_throughput": rates["prompt_tokens_per_s"] + rates["output_tokens_per_s"],
        "max_output_tokens_per_s": summary["peak_output_tokens_per_s"],
        "max_concurrent_requests": summary["peak_concurrent_requests"],
    }
    for short, name in _VLLM_NAMES.items():
        for part, value in (summary[name] or {}).items():
            if part not in ("count", "max"):
                found[f"{part}_{short}_ms"] = 1000 * value
                if part == "p50":
                    found[f"median_{short}_ms"] = 1000 * value
    return found


def as_table(summary: Mapping[str, Any]) -> str:
    """A run's figures for a terminal."""
    rates, good = summary["throughput"], summary["goodput"]
    parts = [part for part in summary["client_lateness_s"] or {} if part != "count"]
    lines = [
        f"{summary['num_finished']} of {summary['num_requests']} requests finished in "
        f"{summary['duration_s']:.2f} s",
        f"{rates['requests_per_s']:.2f} requests/s, "
        f"{rates['prompt_tokens_per_s']:.1f} prompt tok/s "
        f"({summary['num_cached_tokens']} of {summary['num_prompt_tokens']} tokens cached), "
        f"{rates['output_tokens_per_s']:.1f} output tok/s",
        f"peaks: {summary['peak_output_tokens_per_s']:.0f} output tok in a second, "
        f"{summary['peak_concurrent_requests']} requests at once",
    ]
    if good is not None:
        limits = (f"{name} {1000 * limit:g} ms" for name, limit in good["slos_s"].items())
        words = f"{good['requests_per_s']:.2f} requests/s, {good['share']:.1%} within"
        lines.append(f"goodput: {words} {', '.join(limits)}")
    lines += latency_lines({title: summary[name] for name, title in LATENCY_TITLES.items()}, parts)
    for kind, count in summary["errors"].items():
        example = summary["error_examples"][kind]
        lines.append(f"failed, {kind}: {count}" + (f", for example: {example}" if example else ""))
    return "\n".join(lines)


def _warnings(
    summary: Mapping[str, Any], clients: Sequence[ClientFacts], is_limited: bool
) -> list[str]:
    """What makes the figures doubtful: failures, and a client that is the bottleneck."""
    found = []
    num_failed = sum(summary["errors"].values())
    if num_failed:
        found.append(f"{num_failed} of {summary['num_requests']} requests failed")
    medians = [summary[name]["p50"] for name in ("ttft_from_send_s", "tpot_s") if summary[name]]
    most_lag_s = max(_LEAST_LAG_S, _MOST_LAG * min(medians, default=0.0))
    cpu_share = max((client.cpu_share for client in clients), default=0.0)
    lag_s = max((client.loop_lag_p99_s for client in clients), default=0.0)
    late_s = (summary["client_lateness_s"] or {}).get("p99", 0.0)
    reasons = []
    if cpu_share > _MOST_CPU:
        reasons.append(f"a client process used {cpu_share:.0%} of a core")
    if lag_s > most_lag_s:
        reasons.append(f"its event loop ran {1000 * lag_s:.0f} ms late (p99)")
    if late_s > most_lag_s and not is_limited:
        reasons.append(f"requests were sent {1000 * late_s:.0f} ms late (p99)")
    if reasons:
        found.append(
            f"the client is a bottleneck: {', '.join(reasons)}; latencies contain it. Give it more "
            "--processes, or cores of its own"
        )
    return found


def verdict_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about a comparison."""
    parts = []
    for verdict in ("better", "worse"):
        names = [row["figure"].split(",")[0] for row in rows if row["verdict"] == verdict]
        if names:
            parts.append(f"{verdict} in {', '.join(names)}")
    return "; ".join(parts) or "neither clearly better nor worse"


def comparison_table(rows: Sequence[Mapping[str, Any]], first: str, second: str) -> str:
    """A comparison for a terminal."""
    lines = [f"{'':<24}{first[:14]:>15}{second[:14]:>15}{'ratio':>9}{'95 % interval':>19}"]
    for row in rows:
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(
            f"{row['figure']:<24}{row['first']:>15.4g}{row['second']:>15.4g}{row['ratio']:>9.3f}"
            f"{interval:>19}  {row['verdict']}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------- files


def write_json(path: Path, results: Sequence[Result]) -> None:
    """One result, or all under `runs`; with every request, as columns."""
    documents = []
    for one in results:
        columns = {
            name: [_rounded(getattr(record, name)) for record in one.records] for name in _FIELDS
        }
        documents.append(one.document | {"requests": columns})
    document = documents[0] if len(documents) == 1 else {"runs": documents}
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n")


def read_json(path: Path) -> list[Result]:
    """Raises ValueError: not a file that `write_json` wrote."""
    try:
        document = json.loads(path.read_text())
        results = []
        for one in document.get("runs", [document]):
            columns = one.pop("requests")
            rows = zip(*(columns[name] for name in _FIELDS), strict=True)
            records = [RequestRecord(*row) for row in rows]
            results.append(Result(str(one["label"]), one, records))
        return results
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no result of a load test with its requests ({type(error).__name__}: "
            f"{error}); write one with --json FILE"
        ) from None


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """A row a request."""
    latencies = [name for name in LATENCY_TITLES if name != "inter_token_s"]
    fields = [name for name in _FIELDS if name != "gaps_s"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", *fields, *latencies])
        for one in results:
            for record in one.records:
                found = record.latencies()
                row = [getattr(record, name) for name in fields]
                row += [found.get(name) for name in latencies]
                writer.writerow([one.name, *(_rounded(value) for value in row)])


def _rounded(value: Any) -> Any:
    """The value rounded to microseconds."""
    if isinstance(value, list):
        return [round(one, 6) for one in value]
    return round(value, 6) if isinstance(value, float) else value
