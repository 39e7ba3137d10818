"""From the logs of client processes to counts, a table and the list of failures."""

import functools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from frontend.load.records import distribution

_NEAR_S = 10.0


class Tally:
    """
    Args:
        logs: of each client process its log, and when it was killed (None: it was not).
        faults: each with `at_s`, `kind`, `target`.
    """

    def __init__(
        self, logs: Iterable[tuple[Path, float | None]], faults: list[dict[str, Any]]
    ) -> None:
        self._faults = faults
        self.by_kind: dict[str, Counter[str]] = {}
        self.by_reason: Counter[str] = Counter()
        self.failures: list[str] = []
        self.num_tokens = 0
        self.num_resumptions = 0
        self.num_duplicates = 0
        self.gaps_s: list[float] = []
        self.num_descriptors_kept = 0
        for path, killed_s in logs:
            self._add_log(path, killed_s)

    def _add_log(self, path: Path, killed_s: float | None) -> None:
        running: dict[str, dict[str, Any]] = {}
        ended: set[str] = set()
        at_start = None
        has_exited = False
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                assert killed_s is not None, f"{path} has the broken line {line[:200]}"
                continue
            match entry["event"]:
                case "start":
                    at_start = entry["num_descriptors"]
                case "begin":
                    running[entry["id"]] = entry
                case "end":
                    begin = running.pop(entry["id"], None)
                    if entry["id"] in ended or begin is None:
                        self.num_duplicates += 1
                        self._fail(f"{path.name}: request {entry['id']} ended twice", entry, begin)
                    ended.add(entry["id"])
                    self._add_end(path, begin or entry, entry)
                case "exit":
                    has_exited = True
                    kept = entry["num_descriptors"] - at_start
                    self.num_descriptors_kept = max(self.num_descriptors_kept, kept)
        for begin in running.values():
            if killed_s is not None:
                self._count(begin["kind"], "cut by a kill")
            else:
                self._count(begin["kind"], "lost")
                self._fail(f"{path.name}: request {begin['id']} never ended", begin, begin)
        if killed_s is None and not has_exited:
            self._fail(f"{path.name}: the client process did not exit by itself", None, None)

    def _add_end(self, path: Path, begin: dict[str, Any], end: dict[str, Any]) -> None:
        verdict = end["verdict"]
        reasons = end.get("reasons", [])
        if verdict == "ok":
            early = {"abort", "timeout"}.intersection(reasons)
            verdict = early.pop() if early else "left" if not end["num_ends"] else "finished"
        self._count(begin["kind"], verdict)
        self.by_reason.update(map(str, reasons))
        if verdict not in ("wrong", "lost"):
            self.num_tokens += end.get("num_tokens", 0)
        self.num_duplicates += end.get("num_ends", 0) > 1
        self.num_resumptions += end.get("num_resumptions", 0)
        self.gaps_s += end.get("gaps_s", [])
        if end.get("problems"):
            self._fail(f"{path.name}: {'; '.join(end['problems'])}", end, begin)

    def _count(self, kind: str, verdict: str) -> None:
        self.by_kind.setdefault(kind, Counter())[verdict] += 1

    def _fail(self, text: str, entry: dict[str, Any] | None, begin: dict[str, Any] | None) -> None:
        lines = [text]
        if entry is not None:
            lines += [f"    {name}: {json.dumps(value)}" for name, value in entry.items()]
            start_s = (begin or entry)["at_s"]
            lines.append(f"  it ran from {start_s:.2f} to {entry['at_s']:.2f} s; faults near it:")
            lines += [
                f"    {fault['at_s']:.2f} {fault['kind']} {fault['target']}"
                for fault in self._faults
                if start_s - _NEAR_S <= fault["at_s"] <= entry["at_s"] + _NEAR_S
                and fault["target"] in ("daemon", path_of(text))
            ]
        self.failures.append("\n".join(lines))

    def total(self, verdict: str) -> int:
        return sum(counts[verdict] for counts in self.by_kind.values())

    @property
    def num_requests(self) -> int:
        return sum(map(Counter.total, self.by_kind.values()))

    def table(self) -> str:
        verdicts = sorted({verdict for counts in self.by_kind.values() for verdict in counts})
        rows = [["kind", *verdicts]]
        rows += [
            [kind, *(str(counts[verdict]) for verdict in verdicts)]
            for kind, counts in sorted(self.by_kind.items())
        ]
        rows.append(["all", *(str(self.total(verdict)) for verdict in verdicts)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )


def path_of(text: str) -> str:
    """The client process that a failure's text begins with, without its incarnation."""
    return text.partition(":")[0].rsplit(".", 2)[0]


percentiles = functools.partial(distribution, percentiles=(50.0, 99.0))
