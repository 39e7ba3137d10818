"""Checks, timings and figures by name: running them, refusing what may not run, the time limit.

Owns the order and the rules. Must not know torch, a GPU, kernels or processes.

    check   -> passed | failed (error above tolerance) | error (it raised) | not run (time limit)
    timing  -> timed | refused (its check did not pass) | error | not run (time limit)
    figure  -> measured | as a timing
    group   -> not there (it needs what no machine can be given) | error (it cannot be loaded)
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Row = dict[str, Any]
"""Result of one check or timing, as it goes into the JSON document."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a kernel with its reference.

    Attributes:
        name: unique in the suite.
        run: makes fresh inputs, runs both, and returns the error. NaN never passes.
        tolerance: largest error that passes; 0 for integer results.
    """

    name: str
    run: Callable[[], float]
    tolerance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a timing times.

    Attributes:
        call: launches the kernel; allocates nothing that a CUDA graph could not.
        num_bytes: the fewest that must move through device memory.
        num_flops: operations of the matrix units; 0 where bytes bound.
        fits_graph: whether `call` may be recorded in a CUDA graph; not if it replays one or waits.
    """

    call: Callable[[], object]
    num_bytes: float
    num_flops: float = 0.0
    fits_graph: bool = True


@dataclass(frozen=True, slots=True)
class Timing:
    """One figure. `check` names the check that must have passed in the same run."""

    name: str
    check: str
    prepare: Callable[[], Work]


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured in a way of its own, such as a whole daemon's throughput by the clock on the
    wall. `measure` gives numbers by name, with their units in it."""

    name: str
    check: str
    measure: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Group:
    """The checks and timings of one module of kernels; runs in a process of its own.

    Attributes:
        figures: taken after the timings.
        missing: why it is not there; its checks, timings and figures are then empty.
        broken: why it cannot run though it should; its parts are then empty or known by name only.
        needs_engine: it imports what a GPU machine has only from carried wheels.
    """

    name: str
    checks: tuple[Check, ...] = ()
    timings: tuple[Timing, ...] = ()
    figures: tuple[Figure, ...] = ()
    missing: str | None = None
    broken: str | None = None
    needs_engine: bool = False

    def validate(self) -> None:
        """
        Raises:
            ValueError: a name is there twice, or a timing's check does not exist.
        """
        measured: tuple[Timing | Figure, ...] = (*self.timings, *self.figures)
        names = [check.name for check in self.checks] + [each.name for each in measured]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"group {self.name} has {min(twice)!r} twice; rename one")
        checks = {check.name for check in self.checks}
        for each in measured:
            if each.check not in checks:
                raise ValueError(
                    f"timing {each.name!r} is bound to the check {each.check!r}, which group "
                    f"{self.name} does not have"
                )

    def select(self, only: str) -> Group:
        """What has the text in its name or its group's, and the checks that timings need."""
        if only in self.name:
            return self
        timings = tuple(timing for timing in self.timings if only in timing.name)
        figures = tuple(figure for figure in self.figures if only in figure.name)
        measured: tuple[Timing | Figure, ...] = (*timings, *figures)
        needed = {each.check for each in measured}
        checks = tuple(c for c in self.checks if only in c.name or c.name in needed)
        return dataclasses.replace(self, checks=checks, timings=timings, figures=figures)


class Timer(Protocol):
    """Times a call on the device."""

    def measure(self, call: Callable[[], object], *, in_graph: bool) -> Mapping[str, Any]:
        """At least `median_us`."""
        ...


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do, measured in the same run; bytes and operations a second."""

    copy_bytes_s: float
    matmul_flop_s: float

    def floor_us(self, work: Work) -> float:
        """No version takes much less."""
        return 1e6 * max(work.num_bytes / self.copy_bytes_s, work.num_flops / self.matmul_flop_s)


def run_checks(
    checks: Iterable[Check],
    *,
    clock: Callable[[], float],
    deadline_s: float,
    emit: Callable[[Row], None],
) -> None:
    """Every check, in order; `emit` gets each row as soon as it is known."""
    for check in checks:
        row: Row = {"kind": "check", "name": check.name, "tolerance": check.tolerance}
        start_s = clock()
        if start_s >= deadline_s:
            emit(row | {"state": "not run", "why": "time limit"})
            continue
        try:
            error = float(check.run())
        except Exception as problem:
            emit(row | {"state": "error", "why": _describe(problem)})
            continue
        # so that NaN fails
        state = "passed" if error <= check.tolerance else "failed"
        emit(row | {"state": state, "error": error, "seconds": round(clock() - start_s, 3)})


def run_timings(
    timings: Iterable[Timing],
    *,
    states: Mapping[str, str],
    ceilings: Ceilings,
    timer: Timer,
    clock: Callable[[], float],
    deadline_s: float,
    emit: Callable[[Row], None],
) -> None:
    """Every timing whose check passed.

    Args:
        states: of the checks, by name.
    """
    for timing in timings:
        row: Row = {"kind": "timing", "name": timing.name, "check": timing.check}
        refusal = _refusal(timing.check, states, clock() >= deadline_s)
        if refusal is not None:
            emit(row | refusal)
            continue
        try:
            work = timing.prepare()
            figures = dict(timer.measure(work.call, in_graph=work.fits_graph))
        except Exception as problem:
            emit(row | {"state": "error", "why": _describe(problem)})
            continue
        emit(row | {"state": "timed"} | figures | _rates(work, ceilings, figures["median_us"]))


def run_figures(
    figures: Iterable[Figure],
    *,
    states: Mapping[str, str],
    clock: Callable[[], float],
    deadline_s: float,
    emit: Callable[[Row], None],
) -> None:
    """Every figure whose check passed; its numbers stand under "figures"."""
    for figure in figures:
        row: Row = {"kind": "figure", "name": figure.name, "check": figure.check}
        refusal = _refusal(figure.check, states, clock() >= deadline_s)
        if refusal is not None:
            emit(row | refusal)
            continue
        start_s = clock()
        try:
            numbers = dict(figure.measure())
        except Exception as problem:
            emit(row | {"state": "error", "why": _describe(problem)})
            continue
        seconds = round(clock() - start_s, 3)
        emit(row | {"state": "measured", "figures": numbers, "seconds": seconds})


def exit_code(rows: Sequence[Row]) -> int:
    """0 if all that was asked for ran and passed."""
    fine = ("passed", "timed", "measured", "not there")
    return int(any(row["state"] not in fine for row in rows))


def _refusal(check: str, states: Mapping[str, str], is_late: bool) -> Row | None:
    """Why a time may not be taken, if so."""
    state = states.get(check, "not run")
    if state != "passed":
        return {"state": "refused", "why": f"its check: {state}"}
    return {"state": "not run", "why": "time limit"} if is_late else None


def _rates(work: Work, ceilings: Ceilings, median_us: float) -> Row:
    floor_us = ceilings.floor_us(work)
    rates: Row = {
        "num_bytes": work.num_bytes,
        "gigabytes_s": round(work.num_bytes / median_us / 1e3, 1),
        "floor_us": round(floor_us, 2),
        "of_floor": round(floor_us / median_us, 3),
    }
    if work.num_flops:
        rates["num_flops"] = work.num_flops
        rates["teraflop_s"] = round(work.num_flops / median_us / 1e6, 1)
    return rates


def _describe(problem: Exception) -> str:
    """The error, and the innermost line of ours."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if "site-packages" not in f[0]]
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:400]}{where}"
