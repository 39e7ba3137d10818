"""One HTML page of a result, a sweep, or two results compared; it loads nothing."""

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from frontend.load import charts
from frontend.load.records import RequestRecord, running_by_time, span_s, tokens_by_time
from frontend.load.results import LATENCY_TITLES, Result, verdict_line

_MAX_ROWS = 240
_NUM_INTERVALS = 60
_LINES = ("ttft_s", "tpot_s", "inter_token_s", "end_to_end_s")
_VERDICTS = {"better": "c2", "worse": "bad", "no clear difference": "held"}
_BARS = {
    "held": "arrived, not sent yet",
    "c1": "sent, no token yet",
    "c0": "tokens come",
    "bad": "failed",
}


def page(results: Sequence[Result], comparisons: Sequence[Sequence[Mapping[str, Any]]] = ()) -> str:
    """The document. With `comparisons`, results are pairs: first, second, first, second ..."""
    title = "Two load tests compared" if comparisons else "Load test"
    style = Path(__file__).with_name("page.css").read_text()
    body = [f"<h1>{title}</h1>", _heading(results[0].document)]
    body += [
        f'<p class="warning">{escape(f"{one.name}: {warning}")}</p>'
        for one in results
        for warning in one.document["warnings"]
    ]
    for at, rows in enumerate(comparisons):
        body.append(_comparison(rows, *(one.name for one in results[2 * at : 2 * at + 2])))
    body.append(_section("Summary", [], _summary(results)))
    if len(results) > 1 and not comparisons:
        body.append(_section("Throughput and latency", _curves(results)))
    tables = "".join(_latencies(one) for one in results)
    body.append(_section("Latencies", _cdfs(results), tables))
    body.append(_section("Over time", _over_time(results)))
    body.append(_section("Requests", [], "".join(_timeline(one) for one in results)))
    body.append(_section("Settings", [], _settings(results[0].document)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _section(title: str, figures: Sequence[str], more: str = "") -> str:
    grid = f'<div class="pair">{"".join(figures)}</div>' if figures else ""
    return f"<h2>{escape(title)}</h2>{grid}{more}"


def _heading(document: Mapping[str, Any]) -> str:
    environment = document["environment"]
    machine = environment["machine"]
    words = (
        f"{document['model_id']} at {document['target']}, {document['backend']}. "
        f"{environment['date']}, commit {environment['commit']}, client on {machine['cores']} "
        f"cores of {machine['processor']}."
    )
    return (
        f"<p>{escape(words)}</p><p>Latencies count from the scheduled arrival, so a slow server "
        "cannot hide by being asked less; &ldquo;from send&rdquo; counts from the moment of "
        "sending, as vLLM's benchmark does.</p>"
    )


def _summary(results: Sequence[Result]) -> str:
    titles = ["load", "finished", "failed", "requests/s", "output tok/s"]
    for name in ("TTFT", "TPOT", "E2EL"):
        titles += [f"{name} p50, ms", "p99"]
    rows, failures = [], []
    for one in results:
        summary = one.document["results"]
        rates, good = summary["throughput"], summary["goodput"]
        cells = [one.name, summary["num_finished"], sum(summary["errors"].values())]
        cells += [f"{rates['requests_per_s']:.3g}", f"{rates['output_tokens_per_s']:.4g}"]
        for name in ("ttft_s", "tpot_s", "end_to_end_s"):
            cells += [_ms(summary[name], "p50"), _ms(summary[name], "p99")]
        cells.append("-" if good is None else f"{good['requests_per_s']:.3g} ({good['share']:.0%})")
        rows.append(cells)
        for kind, count in summary["errors"].items():
            failures.append([f"{one.name}: {kind}", count, summary["error_examples"][kind]])
    table = _table([*titles, "goodput/s"], rows)
    return table + (_table(("failure", "requests", "for example"), failures) if failures else "")


def _curves(results: Sequence[Result]) -> list[str]:
    summaries = sorted(
        (one.document["results"] for one in results),
        key=lambda summary: summary["throughput"]["output_tokens_per_s"],
    )
    found = []
    for name in ("ttft_s", "tpot_s", "end_to_end_s"):
        series = {
            part: [
                (summary["throughput"]["output_tokens_per_s"], 1000 * summary[name][part])
                for summary in summaries
                if summary[name]
            ]
            for part in ("p50", "p99")
        }
        y_label = f"{LATENCY_TITLES[name]}, ms"
        title = f"Throughput and {LATENCY_TITLES[name]}"
        found.append(
            charts.line_chart(title, "output tok/s", y_label, series, log_y=True, dots=True)
        )
    good = [
        (summary["throughput"]["output_tokens_per_s"], summary["goodput"]["requests_per_s"])
        for summary in summaries
        if summary["goodput"]
    ]
    series = {"goodput": good}
    found.append(charts.line_chart("Goodput", "output tok/s", "requests/s", series, dots=True))
    return found


def _values_ms(records: Sequence[RequestRecord], name: str) -> list[float]:
    done = [record for record in records if record.error is None]
    if name == "inter_token_s":
        return [1000 * gap for record in done for gap in record.gaps_s]
    found = (record.latencies().get(name) for record in done)
    return [1000 * value for value in found if value is not None]


def _cdfs(results: Sequence[Result]) -> list[str]:
    """Of one result the latencies together, of several each latency of all."""
    titles = LATENCY_TITLES
    if len(results) > 1:
        groups = {titles[name]: {one.name: (one, name) for one in results} for name in _LINES}
    else:
        whole = ("ttft_s", "ttft_from_send_s", "end_to_end_s")
        groups = {
            "First token and whole answer": {titles[name]: (results[0], name) for name in whole},
            "Between tokens": {titles[name]: (results[0], name) for name in _LINES[1:3]},
        }
    found = []
    for title, lines in groups.items():
        series = {
            key: charts.cdf(_values_ms(one.records, name)) for key, (one, name) in lines.items()
        }
        found.append(charts.line_chart(title, "ms", "share of requests", series, log_x=True))
    return found


def _latencies(result: Result) -> str:
    summary = result.document["results"]
    found = {title: summary[name] for name, title in LATENCY_TITLES.items() if summary[name]}
    parts = [part for part in next(iter(found.values()), {}) if part != "count"]
    rows = [[title, *(_ms(values, part) for part in parts)] for title, values in found.items()]
    return _table((f"{result.name}: ms", *parts), rows)


def _over_time(results: Sequence[Result]) -> list[str]:
    tokens: dict[str, charts.Points] = {}
    running: dict[str, charts.Points] = {}
    for one in results:
        start_s, stop_s = span_s(one.records)
        width_s = max((stop_s - start_s) / _NUM_INTERVALS, 0.25)
        counts = tokens_by_time(one.records, start_s, width_s)
        tokens[one.name] = [((at + 0.5) * width_s, num / width_s) for at, num in enumerate(counts)]
        steps = [(at - start_s, num) for at, num in running_by_time(one.records)]
        # a step holds until the next one
        running[one.name] = [
            point
            for (at, num), (until, _) in itertools.pairwise(steps)
            for point in ((at, num), (until, num))
        ]
    return [
        charts.line_chart("Output throughput", "seconds", "output tok/s", tokens),
        charts.line_chart("Requests in flight", "seconds", "requests", running),
    ]


def _timeline(result: Result) -> str:
    records = sorted(result.records, key=lambda record: record.due_s)
    every = max(1, math.ceil(len(records) / _MAX_ROWS))
    start_s, _ = span_s(records)
    rows = []
    for one in records[::every]:
        stop_s = one.due_s if one.finished_s is None else one.finished_s
        first_s = stop_s if one.first_token_s is None else one.first_token_s
        bars = [(one.due_s, one.sent_s, "held"), (one.sent_s, first_s, "c1")]
        bars.append((first_s, stop_s, "c0"))
        if one.error is not None:
            bars = [(one.due_s, stop_s, "bad")]
        bars = [(a - start_s, b - start_s, kind) for a, b, kind in bars]
        note = f"{one.index}: {one.num_prompt_tokens} + {one.num_output_tokens} tokens"
        rows.append(charts.Row(bars, f"{note} {one.error or ''}"))
    which = "" if every == 1 else f", one of {every}"
    title = f"{result.name}: a row a request{which}, by arrival"
    return charts.row_chart(title, "seconds", rows, _BARS)


def _comparison(rows: Sequence[Mapping[str, Any]], first: str, second: str) -> str:
    cells, bars = [], []
    for row in rows:
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        figures = f"{row['first']:.4g}", f"{row['second']:.4g}", f"{row['ratio']:.3f}"
        cells.append([row["figure"], *figures, interval, row["verdict"]])
        bar = row["low"], row["high"], _VERDICTS[row["verdict"]]
        point = row["ratio"] * 0.998, row["ratio"] * 1.002, "point"
        bars.append(charts.Row([bar, point], f"{figures[-1]}, {interval}", row["figure"]))
    legend = {kind: text for text, kind in _VERDICTS.items()}
    picture = charts.row_chart(
        "Second / first, with 95 % intervals", "ratio", bars, legend, log=True
    )
    titles = ("", "first", "second", "ratio", "95 % interval", "the second is")
    words = f"First: {first}. Second: {second}. The second is {verdict_line(rows)}."
    return _section("Compared", [], f"<p>{escape(words)}</p>{picture}{_table(titles, cells)}")


def _settings(document: Mapping[str, Any]) -> str:
    settings = {**document["configuration"], **document["metadata"]}
    rows = [[name, value] for name, value in settings.items() if value not in (None, "", [], ())]
    return _table(("option", "value"), rows)


def _ms(values: Mapping[str, float] | None, part: str) -> str:
    if values is None or part not in values:
        return "-"
    value = 1000 * values[part]
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def row(tag: str, cells: Sequence[Any]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="scroll"><table>{row("th", titles)}{body}</table></div>'
