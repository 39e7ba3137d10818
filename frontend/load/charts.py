"""Charts as inline SVG. Colours are the page's CSS classes, so light and dark follow the reader."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
NUM_COLOURS = 6
_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 42
_MAX_POINTS = 400


class _Axis:
    """From values to pixels. A logarithmic one begins at a thousandth of the largest value."""

    def __init__(self, values: Sequence[float], start_px: float, stop_px: float, log: bool) -> None:
        positive = [value for value in values if value > 0]
        high = max(positive, default=1.0)
        low = max(min(positive, default=high), high * 1e-3)
        self._bounds = (low / 1.1, high * 1.1) if log else (0.0, high)
        self._scale = math.log if log else float
        self._log = log
        self._start_px, self._stop_px = start_px, stop_px

    def px(self, value: float) -> float:
        low, at, high = (
            self._scale(max(one, self._bounds[0]))
            for one in (self._bounds[0], value, self._bounds[1])
        )
        return self._start_px + (at - low) / (high - low) * (self._stop_px - self._start_px)

    def ticks(self) -> list[float]:
        """At least two: 1, 2 and 5 of each decade, or 1 alone of many. Where fewer are on the axis,
        as on a linear one: multiples of a 1, 2 or 5 of some decade."""
        low, high = self._bounds
        ticks = []
        if self._log:
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            ticks = [step * 10.0**decade for decade in decades for step in steps]
            ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) < 2:
            widest = (high - low) / 3  # so that three fit, wherever the first one is
            unit = 10.0 ** math.floor(math.log10(widest))
            step = max((unit * one for one in (1, 2, 5) if unit * one <= widest), default=unit)
            multiples = range(math.ceil(low / step), math.floor(high / step) + 1)
            ticks = [step * multiple for multiple in multiples]
        return ticks


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
    dots: bool = False,
) -> str:
    """A figure, empty without points. Lines past NUM_COLOURS take the first colours again."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    bottom = _HEIGHT - _BOTTOM
    x = _Axis([at for at, _ in points], _LEFT, _WIDTH - _RIGHT, log_x)
    y = _Axis([at for _, at in points], bottom, _TOP, log_y)
    parts = _x_ticks(x, bottom)
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{_LEFT} {y.px(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y.px(tick) + 4, f"{tick:g}", "end"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_label))
    turned = f'transform="translate(14 {bottom / 2:g}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {turned}>{escape(y_label)}</text>")
    keys = {f"c{number % NUM_COLOURS}": name for number, name in enumerate(series)}
    for number, line in enumerate(series.values()):
        places = [(x.px(at), y.px(value)) for at, value in _thinned(line)]
        kind = f"c{number % NUM_COLOURS}"
        path = "L".join(f"{at:.1f} {value:.1f}" for at, value in places)
        parts.append(f'<path class="line {kind}" d="M{path}"/>' if places else "")
        for at, value in places if dots else ():
            parts.append(f'<circle class="{kind}" cx="{at:.1f}" cy="{value:.1f}" r="4"/>')
    return _figure(title, (_WIDTH, _HEIGHT), parts, keys if len(series) > 1 else {})


def cdf(values: Sequence[float]) -> Points:
    """(value, share of the values that are at most it)."""
    return [(value, (at + 1) / len(values)) for at, value in enumerate(sorted(values))]


class Row(NamedTuple):
    """Bars of one row: (start, stop, CSS class). `note` is shown when it is pointed at."""

    bars: Sequence[tuple[float, float, str]]
    note: str
    label: str = ""


def row_chart(
    title: str, x_label: str, rows: Sequence[Row], legend: Mapping[str, str], *, log: bool = False
) -> str:
    """Rows of bars below each other. `legend`: from CSS classes to words."""
    has_labels = any(row.label for row in rows)
    height_px = 20.0 if has_labels else max(2.0, min(10.0, 480 / max(len(rows), 1)))
    bottom = _TOP + height_px * len(rows)
    ends = [end for row in rows for start, stop, _ in row.bars for end in (start, stop)]
    left = 190.0 if has_labels else 8.0
    x = _Axis([*ends, 1.0] if log else ends, left, 2 * _WIDTH - 8, log)
    parts = _x_ticks(x, bottom)
    for at, row in enumerate(rows):
        top = _TOP + at * height_px
        parts.append(f"<g><title>{escape(row.note)}</title>")
        parts += [
            f'<rect class="{kind}" x="{x.px(start):.1f}" y="{top + height_px * 0.1:.1f}" '
            f'width="{max(x.px(stop) - x.px(start), 0.5):.1f}" height="{height_px * 0.8:.1f}"/>'
            for start, stop, kind in row.bars
        ]
        parts.append(_text(left - 10, top + 14, row.label, "end") if row.label else "")
        parts.append("</g>")
    parts.append(_text(_WIDTH, bottom + 34, x_label))
    return _figure(title, (2 * _WIDTH, bottom + 42), parts, legend)


def _thinned(points: Points) -> Points:
    """Evenly picked, with the first and the last one."""
    last, most = len(points) - 1, _MAX_POINTS - 1
    return points if last <= most else [points[round(at * last / most)] for at in range(most + 1)]


def _x_ticks(x: _Axis, bottom: float) -> list[str]:
    return [
        f'<path class="grid" d="M{x.px(tick):.1f} {_TOP}V{bottom:.1f}"/>'
        + _text(x.px(tick), bottom + 16, f"{tick:g}")
        for tick in x.ticks()
    ]


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(
    title: str, size: tuple[float, float], parts: Sequence[str], legend: Mapping[str, str]
) -> str:
    keys = "".join(
        f'<li><i class="{kind}"></i>{escape(text)}</li>' for kind, text in legend.items()
    )
    svg = f'<svg viewBox="0 0 {size[0]:g} {size[1]:g}" role="img" aria-label="{escape(title)}">'
    words = f"<figcaption>{escape(title)}</figcaption>"
    return f"<figure>{words}{svg}{''.join(parts)}</svg><ul>{keys}</ul></figure>"
