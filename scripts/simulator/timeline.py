"""What went on over time, in a bounded number of buckets, for the pictures.

Buckets begin a millisecond wide; when time runs out of them, pairs are merged and they are twice as
wide. A step is spread evenly over the time that it lasts.
"""

import numpy as np
import numpy.typing as npt

FIELDS = ("prefill tokens", "decode tokens", "blocks in use", "running", "waiting", "engines busy")
_NUM_BUCKETS = 2048
_FIRST_WIDTH_S = 1e-3


class Timeline:
    """Sums over engines. `values[field, bucket]` are time integrals: a mean after division by the
    bucket's width."""

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._values = np.zeros((len(FIELDS), _NUM_BUCKETS))

    def add(self, start_s: float, duration_s: float, values: tuple[float, ...]) -> None:
        """A step with these values, in the order of FIELDS."""
        if duration_s <= 0:
            return
        stop_s = start_s + duration_s
        while stop_s >= self._width_s * _NUM_BUCKETS:
            self._widen()
        first, last = int(start_s / self._width_s), int(stop_s / self._width_s)
        if first == last:
            self._values[:, first] += np.multiply(values, duration_s)
            return
        edges = np.arange(first, last + 2) * self._width_s
        edges[0], edges[-1] = start_s, stop_s
        self._values[:, first : last + 1] += np.outer(values, np.diff(edges))

    def series(self) -> tuple[npt.NDArray[np.float64], dict[str, npt.NDArray[np.float64]]]:
        """The middles of the buckets in seconds, up to the last one in use, and each field's mean
        in them. Tokens are the mean of a step's, over the time that steps take."""
        used = np.flatnonzero(self._values[-1])
        stop = int(used[-1]) + 1 if len(used) else 0
        times = (np.arange(stop, dtype=np.float64) + 0.5) * self._width_s
        means = self._values[:, :stop] / self._width_s
        return times, dict(zip(FIELDS, means, strict=True))

    def _widen(self) -> None:
        merged = self._values[:, ::2] + self._values[:, 1::2]
        self._values = np.concatenate([merged, np.zeros_like(merged)], axis=1)
        self._width_s *= 2
