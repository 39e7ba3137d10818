"""The runs that have a name: a question, what answers it in a few minutes, and what is expected."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

_FILE = Path(__file__).with_name("runs.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """
    Attributes:
        question: that it decides.
        seconds: in which it ends.
        checks: folders and files of tests that run first.
        check_s: of the seconds, the most that these take.
        only: families, groups and names of timings with one of these texts in them.
        figures_for: the card that `predicted` is for.
        predicted: by a timing's or figure's name, what is expected of it: `median_us`, or numbers
            by their names. Written before the run.
    """

    question: str
    seconds: float
    checks: tuple[str, ...] = ()
    check_s: float = 0.0
    only: tuple[str, ...] = ()
    figures_for: str = "H200"
    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def named_runs() -> dict[str, NamedRun]:
    """All runs of `runs.toml`, by name."""
    return msgspec.convert(tomllib.loads(_FILE.read_text()), dict[str, NamedRun])
