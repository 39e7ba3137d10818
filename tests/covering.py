"""Parameters of a test in few rows: every pair of values, where all combinations would be many."""

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest


def covering_pairs(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Like one `parametrize` an axis, but of all combinations as few as hold each value of an axis
    with each value of every other one; the same rows in every run."""
    names, values = list(axes), [list(each) for each in axes.values()]
    rows = list(itertools.product(*(range(len(each)) for each in values)))
    random.Random(0).shuffle(rows)
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing & _pairs(row))))
        missing -= _pairs(chosen[-1])
    return pytest.mark.parametrize(
        names, [[each[at] for each, at in zip(values, row, strict=True)] for row in sorted(chosen)]
    )


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), 2))
