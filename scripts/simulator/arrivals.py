"""When requests arrive: endless streams of rising times, in seconds. Same generator, same times."""

import math
from collections.abc import Iterator

import numpy as np

from scripts.simulator.errors import SimulationError

_CHUNK = 4096


def poisson(rate: float, random: np.random.Generator) -> Iterator[float]:
    """Independent arrivals, `rate` a second on average."""
    return gamma(rate, 1.0, random)


def gamma(rate: float, cv: float, random: np.random.Generator) -> Iterator[float]:
    """Gaps from a gamma distribution with this coefficient of variation: 1 is Poisson, above it
    bursts, 0 a fixed gap."""
    _check_rate(rate)
    if not (cv >= 0 and math.isfinite(cv)):
        raise SimulationError(f"the burstiness (CV) is {cv}, it must be at least 0; 1 is Poisson")
    now_s = 0.0
    while True:
        if cv:
            gaps = random.gamma(1 / cv**2, cv**2 / rate, _CHUNK)
        else:
            gaps = np.full(_CHUNK, 1 / rate)
        times = now_s + np.cumsum(gaps)
        now_s = float(times[-1])
        yield from times.tolist()


def diurnal(
    rate: float, swing: float, period_s: float, random: np.random.Generator
) -> Iterator[float]:
    """A Poisson process whose rate is rate * (1 + swing * sin(2 pi t / period_s)), by thinning."""
    _check_rate(rate)
    if not 0 <= swing <= 1:
        raise SimulationError(f"the swing of the rate is {swing}, it must be from 0 to 1")
    if not period_s > 0:
        raise SimulationError(f"the period is {period_s} s, it must be above 0")
    now_s, peak = 0.0, rate * (1 + swing)
    while True:
        times = now_s + np.cumsum(random.exponential(1 / peak, _CHUNK))
        now_s = float(times[-1])
        wanted = rate * (1 + swing * np.sin(2 * math.pi * times / period_s))
        yield from times[random.random(_CHUNK) * peak < wanted].tolist()


def _check_rate(rate: float) -> None:
    if not (rate > 0 and math.isfinite(rate)):
        raise SimulationError(f"the rate is {rate} requests a second, it must be above 0")
