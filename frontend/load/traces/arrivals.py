"""When requests arrive: endless streams of rising times, in seconds. Same generator, same times."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

_CHUNK = 4096


def poisson(rate: float, random: np.random.Generator) -> Iterator[float]:
    """Independent arrivals, `rate` a second on average."""
    return gamma(rate, 1.0, random)


def gamma(rate: float, burstiness: float, random: np.random.Generator) -> Iterator[float]:
    """Gaps from a gamma distribution of this shape, as vLLM's --burstiness: 1 is Poisson, below it
    bursts, infinity a fixed gap. The gaps' coefficient of variation is burstiness ** -0.5. Raises
    ValueError: at the first arrival: a rate or a burstiness that is not above 0."""
    _check_rate(rate)
    _check_burstiness(burstiness)
    now_s = 0.0
    while True:
        times = now_s + np.cumsum(_unit_gaps(burstiness, _CHUNK, random) / rate)
        now_s = float(times[-1])
        yield from times.tolist()


def ramp(
    first_rate: float, last_rate: float, strategy: str, num_requests: int, burstiness: float
) -> Callable[[np.random.Generator], Iterator[float]]:
    """So many arrivals whose rate goes from the first to the last, request by request: `linear` by
    the same number each, `exponential` by the same factor. Raises ValueError: a rate or a
    burstiness that is not above 0."""
    for rate in (first_rate, last_rate):
        _check_rate(rate)
    _check_burstiness(burstiness)
    space = np.geomspace if strategy == "exponential" else np.linspace
    rates = space(first_rate, last_rate, num_requests)
    return lambda random: iter(
        np.cumsum(_unit_gaps(burstiness, num_requests, random) / rates).tolist()
    )


def diurnal(
    rate: float, swing: float, period_s: float, random: np.random.Generator
) -> Iterator[float]:
    """A Poisson process whose rate is rate * (1 + swing * sin(2 pi t / period_s)), by thinning.
    Raises ValueError: at the first arrival: a value outside its range."""
    _check_rate(rate)
    if not 0 <= swing <= 1:
        raise ValueError(f"the swing of the rate is {swing}, it must be from 0 to 1")
    if not period_s > 0:
        raise ValueError(f"the period is {period_s} s, it must be above 0")
    now_s, peak = 0.0, rate * (1 + swing)
    while True:
        times = now_s + np.cumsum(random.exponential(1 / peak, _CHUNK))
        now_s = float(times[-1])
        wanted = rate * (1 + swing * np.sin(2 * math.pi * times / period_s))
        yield from times[random.random(_CHUNK) * peak < wanted].tolist()


def _unit_gaps(
    burstiness: float, count: int, random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Gaps of mean 1."""
    if math.isinf(burstiness):
        return np.ones(count)
    return random.gamma(burstiness, 1 / burstiness, count)


def _check_burstiness(burstiness: float) -> None:
    if not burstiness > 0:
        raise ValueError(f"the burstiness is {burstiness}, it must be above 0; 1 is Poisson")


def _check_rate(rate: float) -> None:
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"the rate is {rate} requests a second, it must be above 0")
